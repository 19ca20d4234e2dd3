"""A program like MinT's older sample, which no official client runs as printed. Prints its results as JSON.

Two debaters, one of which a given judge prefers; all calls are sent before any result is awaited.
"""

import asyncio
import json

import tinker

import palestra.service.mint_compat as mint
from palestra.service.mint_compat import types

MODEL = "Qwen/Qwen3-0.6B"
SCENARIOS = [("should machines be regulated?", 0), ("is it urgent?", 1)]


def datum(tokenizer, text, advantages, **more):
    ids = tokenizer.encode(text)
    inputs = {"target_tokens": ids[1:], "advantages": advantages, "logprobs": [-1.0] * (len(ids) - 1), **more}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


async def debate(agents):
    tokenizers = [agent.get_tokenizer() for agent in agents]
    adam_params = types.AdamParams(learning_rate=1e-3)
    losses = [[], []]
    for _ in range(2):
        for topic, winner in SCENARIOS:
            data = [datum(tokenizers[i], f"agent {i}: {topic}", [1.0 if winner == i else -0.5]) for i in range(2)]
            passes = [agents[i].forward_backward_async([data[i]], loss_fn="ppo") for i in range(2)]
            steps = [agents[i].optim_step_async(adam_params) for i in range(2)]
            for i in range(2):
                result = await passes[i].result_async()
                await steps[i].result_async()
                losses[i].append(result.loss)
    return losses


async def officially(agent):
    """The same calls with the names of official clients, and the result of one advantage for all tokens."""
    tokenizer = agent.get_tokenizer()
    size = len(tokenizer.encode("hello there")) - 1
    data = [datum(tokenizer, "hello there", [0.5], weights=[1.0] * size)]
    future = await agent.forward_backward_async(data, loss_fn="cross_entropy")
    result = await future
    again = (await future.result_async()).loss
    each = [datum(tokenizer, "hello there", [0.5] * size)]
    spread = [agent.forward(d, loss_fn="importance_sampling").result().loss for d in (data, each)]
    return {
        "loss": [result.loss, again, -sum(result.loss_fn_outputs[0]["logprobs"].data)],
        "is": isinstance(result, mint.ForwardBackwardOutput),
        "path": agent.save_weights_for_sampler("kept").result().path,
        "spread": spread,
        "size": size,
    }


def alternatives(agent):
    """Tokens that an adapter would have said in place of those of a prompt."""
    prompt = types.ModelInput.from_ints(agent.get_tokenizer().encode("hello there"))
    sampler = agent.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=1, seed=3)
    reply = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, prompt_alt_tokens_k=5).result()
    drawn = reply.prompt_alt_tokens
    return {"prompt": prompt.length, "drawn": drawn.tokens.to_numpy().tolist(), "shape": drawn.logprobs.shape}


def refusals(service_client, agent):
    """What is said of the optimizer that is not served, at creation and at a step."""
    calls = [
        lambda: service_client.create_lora_training_client(
            base_model=MODEL, rank=4, optimizer=types.DimuonOptimizerConfig()
        ),
        lambda: agent.optim_step(types.DimuonParams(learning_rate=1e-3)).result(),
    ]
    said = []
    for call in calls:
        try:
            call()
        except tinker.BadRequestError as error:
            said.append(str(error))
    return said


async def main():
    service_client = mint.ServiceClient()
    agents = [await service_client.create_lora_training_client_async(base_model=MODEL, rank=16) for _ in range(2)]
    losses = await debate(agents)
    other = service_client.create_lora_training_client(base_model=MODEL, rank=4)
    print(
        json.dumps(
            {
                "losses": losses,
                **await officially(other),
                "alternatives": alternatives(other),
                "dimuon": refusals(service_client, other),
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main())
