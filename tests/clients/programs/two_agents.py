"""The calls of MinT's recipes/multi_agent_rl.py in their order: two LoRA clients of one session, B answers a question
after it has observed A's answer; both are then trained on the right answer. Prints the results as JSON."""

import json
import os

import mint
from mint import types

BASE = os.environ.get("MINT_BASE_MODEL", "Qwen/Qwen3-0.6B")
QUESTIONS = {"what is 2 + 2?": "4", "what is 3 + 5?": "8", "what is 9 - 6?": "3"}
STEPS = 10


def prompt_of(tokenizer, text):
    messages = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(whole, add_special_tokens=False)


def datum(tokenizer, prompt, answer):
    ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    whole, weights = prompt + ids, [0.0] * len(prompt) + [1.0] * len(ids)
    inputs = {"target_tokens": whole[1:], "weights": weights[1:]}
    return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)


def answer(sampler, tokenizer, prompt, temperature):
    params = types.SamplingParams(max_tokens=8, temperature=temperature, stop=[tokenizer.eos_token_id])
    reply = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params).result()
    return tokenizer.decode(reply.sequences[0].tokens, skip_special_tokens=True).strip()


def play(samplers, tokenizer, temperature):
    """All questions with A's answer, B's answer, and the prompts of both."""
    for question, right in QUESTIONS.items():
        first = prompt_of(tokenizer, question)
        said = answer(samplers[0], tokenizer, first, temperature)
        second = prompt_of(tokenizer, f"{question} a says {said}. {question}")
        yield right, said, answer(samplers[1], tokenizer, second, temperature), first, second


def train(client, tokenizer, prompts_and_answers):
    data = [datum(tokenizer, prompt, right) for prompt, right in prompts_and_answers]
    result = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=5e-3))
    step.result()
    return result.result().metrics["loss:sum"]


def frozen(sampler, prompt):
    return sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result()[1:]


def main():
    service = mint.ServiceClient()
    served = [model.model_name for model in service.get_server_capabilities().supported_models]
    assert BASE in served, served
    agents = [service.create_lora_training_client(base_model=BASE, rank=rank) for rank in (8, 16)]
    tokenizer = agents[0].get_tokenizer()
    losses, right = [], []
    for step in range(STEPS):
        samplers = [
            a.save_weights_and_get_sampling_client(name=f"{n}-{step}") for n, a in zip("ab", agents, strict=True)
        ]
        if step == 0:
            first, question = samplers[0], prompt_of(tokenizer, "what is 2 + 2?")
            before = frozen(first, question)
        turns = list(play(samplers, tokenizer, 0.7))
        right.append([sum(t[0] == t[seat] for t in turns) for seat in (1, 2)])
        losses.append(
            [train(a, tokenizer, [(t[seat], t[0]) for t in turns]) for a, seat in zip(agents, (3, 4), strict=True)]
        )
    samplers = [a.save_weights_and_get_sampling_client(name=f"{n}-last") for n, a in zip("ab", agents, strict=True)]
    turns = list(play(samplers, tokenizer, 0.0))
    paths = [a.save_weights_for_sampler(name="final").result().path for a in agents]
    report = {"losses": losses, "right": right, "last": [sum(t[0] == t[seat] for t in turns) for seat in (1, 2)]}
    report |= {"ranks": [a.get_info().lora_rank for a in agents], "paths": paths}
    report["drift"] = max(abs(x - y) for x, y in zip(before, frozen(first, question), strict=True))
    print(json.dumps(report))


main()
