"""Two agents on one task, each with its own LoRA weights: the second answers after it has seen the first's answer.

The question is for the last of three words. Both train on the right answer (cross-entropy), each on its own prompts;
the second's prompts thus change while the first learns.

    palestra serve --alias Qwen/Qwen3-0.6B=tiny          # in one terminal
    pip install tinker                                   # or mindlab-toolkit
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python examples/mint_two_agents.py

If the server refuses a second training client, one client plays both roles in turn. The table at the end has the share
of right answers to held-out questions.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from typing import Any

try:
    import mint as tinker
except ImportError:
    import tinker

types = tinker.types
NAMES = ("first", "second")
WORDS = ("red", "blue", "green", "cat", "dog", "bird", "house", "tree", "river", "stone", "apple", "bread", "window")
Question = tuple[str, str, str]
Turn = list[tuple[list[int], str]]  # an agent's prompt and answer, for each question


def ready(client: Any) -> Any:
    """Newer client libraries return a future of a client, older ones the client itself; returns the client."""
    return client.result() if hasattr(client, "result") else client


def clients(service: Any, base_model: str, seed: int) -> list[Any]:
    """A training client for each agent; the same one twice if the server refuses a second."""
    first = ready(service.create_lora_training_client(base_model=base_model, rank=16, seed=seed))
    try:
        second = ready(service.create_lora_training_client(base_model=base_model, rank=16, seed=seed + 1))
    except tinker.TinkerError as error:
        print(f"warning: no second training client ({error}); one plays both roles by turns", file=sys.stderr)
        second = first
    return [first, second]


def chat(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    return tokenizer.encode(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))


def answers(agent: Any, tokenizer: Any, prompts: list[list[int]]) -> list[str]:
    """The agent's greedy answer to each prompt, with its current weights."""
    sampler = ready(agent.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=6, temperature=0.0)
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    texts = [tokenizer.decode(list(future.result().sequences[0].tokens)) for future in futures]
    return [text.removesuffix(tokenizer.eos_token).strip() for text in texts]


def rollout(agents: list[Any], tokenizer: Any, questions: list[Question]) -> list[Turn]:
    """The turns of both agents: the first reads the question, the second also the first's answer."""
    asked = [f"last of {' '.join(words)}" for words in questions]
    turns: list[Turn] = []
    for agent in agents:
        prompts = [chat(tokenizer, text) for text in asked]
        said = answers(agent, tokenizer, prompts)
        turns.append(list(zip(prompts, said, strict=True)))
        asked = [f"{text}. {NAMES[0]} says {answer}" for text, answer in zip(asked, said, strict=True)]
    return turns


def accuracy(turn: Turn, questions: list[Question]) -> float:
    return sum(said == words[-1] for (_, said), words in zip(turn, questions, strict=True)) / len(questions)


def datum(tokenizer: Any, prompt: list[int], answer: str) -> Any:
    """The training example of a right answer to a prompt. Only the answer's tokens have weight; weights sum to one."""
    reply = tokenizer.encode(answer + tokenizer.eos_token)
    ids, weights = prompt + reply, [0.0] * (len(prompt) - 1) + [1 / len(reply)] * len(reply)
    inputs = {"target_tokens": ids[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def learn(agents: list[Any], data: list[list[Any]], adam: Any) -> list[float]:
    """Makes one step of each agent concurrently; returns their losses per answer."""
    futures = [
        (agent.forward_backward(own, "cross_entropy"), agent.optim_step(adam))
        for agent, own in zip(agents, data, strict=True)
    ]
    losses = [passed.result().metrics["loss:sum"] / len(own) for (passed, _), own in zip(futures, data, strict=True)]
    for _, step in futures:
        step.result()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Two agents, one task, two adapters.")
    parser.add_argument("--base-url", default=os.environ.get("MINT_BASE_URL") or os.environ.get("TINKER_BASE_URL"))
    parser.add_argument("--api-key", default=os.environ.get("MINT_API_KEY") or os.environ.get("TINKER_API_KEY"))
    parser.add_argument("--base-model", default=os.environ.get("MINT_BASE_MODEL", "Qwen/Qwen3-0.6B"))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--questions", type=int, default=64, help="questions per epoch")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    service = tinker.ServiceClient(base_url=args.base_url, api_key=args.api_key)
    agents = clients(service, args.base_model, args.seed)
    tokenizer = agents[0].get_tokenizer()
    questions = list(itertools.permutations(WORDS, 3))
    random.Random(args.seed).shuffle(questions)
    held_out, trained = questions[:40], questions[40:]
    adam = types.AdamParams(learning_rate=args.lr, grad_clip_norm=1.0)
    before = [accuracy(turn, held_out) for turn in rollout(agents, tokenizer, held_out)]
    losses: list[list[float]] = []
    for epoch in range(args.epochs):
        batch = trained[args.questions * epoch : args.questions * (epoch + 1)]
        turns = rollout(agents, tokenizer, batch)
        data = [[datum(tokenizer, p, w[-1]) for (p, _), w in zip(turn, batch, strict=True)] for turn in turns]
        losses.append(learn(agents, data, adam))
        print(f"epoch {epoch:2d}   loss {losses[-1][0]:.3f} {losses[-1][1]:.3f}", flush=True)
    after = [accuracy(turn, held_out) for turn in rollout(agents, tokenizer, held_out)]
    print("\nagent    right before   right after   first loss   last loss")
    for i, name in enumerate(NAMES):
        print(f"{name:7s} {before[i]:13.0%} {after[i]:13.0%} {losses[0][i]:12.3f} {losses[-1][i]:11.3f}")


if __name__ == "__main__":
    main()
