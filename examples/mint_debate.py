"""Two debaters learn to convince a judge: two LoRA adapters of one session, trained against each other with PPO.

Each debate is about which of two words is the right one. One debater knows it, the other can only guess. An answer is
accepted if it is exactly one of the two words. The judge is the base model, prompted to say the right word: if both
answers are accepted, the one with the higher log-probability wins (`compute_logprobs`, so the same answers always get
the same verdict). The winner's tokens get advantage +1, the loser's -0.5. If no answer is accepted, or both are the
same, the debate is a draw: it counts half for each and trains neither. Requests of both debaters are submitted before
either result is awaited.

    palestra serve --alias Qwen/Qwen3-0.6B=tiny          # in one terminal
    pip install tinker                                   # or mindlab-toolkit
    TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python examples/mint_debate.py

At first both give long answers, and nearly all debates are draws. Then the debater that knows the word learns to say
it, and wins. A model that never answers with one word alone wins nothing and learns nothing: `--examples 1` shows both
debaters the form first, as earlier turns of the conversation (instruct models need it).
"""

from __future__ import annotations

import argparse
import math
import os
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

try:
    import mint as tinker
except ImportError:
    import tinker

types = tinker.types
WORDS = ("red", "blue", "green", "cat", "dog", "bird", "house", "tree", "river", "stone", "apple", "bread")
WIN, LOSE = 1.0, -0.5


class Topic(NamedTuple):
    """The word that is right in a debate, and the one that is wrong."""

    truth: str
    error: str

    def prompts(self) -> list[str]:
        """The prompts of the informed debater and of the other."""
        return [f"say the word {self.truth}", "say the word"]


class Speech(NamedTuple):
    """An answer of a debater, with the prompt and the log-probabilities of its tokens."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def topics(count: int, rng: random.Random) -> list[Topic]:
    return [Topic(*rng.sample(WORDS, 2)) for _ in range(count)]


def chat(tokenizer: Any, text: str, examples: Sequence[tuple[str, str]] = ()) -> list[int]:
    """The token ids of a question, after some answered questions as earlier turns."""
    messages = []
    for question, answer in examples:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": text})
    return tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def examples(debater: int, count: int) -> list[tuple[str, str]]:
    """Example questions of a debater, with the right answers."""
    return [(Topic(word, "").prompts()[debater], word) for word in WORDS[:count]]


def speak(sampler: Any, prompts: list[list[int]], seeds: list[int]) -> list[Speech]:
    """Samples an answer to each prompt; all requests are sent before the first answer is awaited."""
    futures = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=seed)
        futures.append(sampler.sample(types.ModelInput.from_ints(prompt), 1, params))
    said = [future.result().sequences[0] for future in futures]
    return [Speech(p, list(s.tokens), list(s.logprobs)) for p, s in zip(prompts, said, strict=True)]


class Judge:
    """The base model as judge; log-probabilities of a question and answer are computed once and stored."""

    def __init__(self, sampler: Any, tokenizer: Any) -> None:
        self.sampler, self.tokenizer = sampler, tokenizer
        self.likely: dict[tuple[str, str], float] = {}

    def verdicts(self, debates: list[Topic], speeches: list[list[Speech]]) -> list[int | None]:
        """The winner of each debate: 0, 1 or None for a draw."""
        claims = [
            [self._claim(t, s) for s in pair] for t, pair in zip(debates, zip(*speeches, strict=True), strict=True)
        ]
        self._ask({(t.truth, claim) for t, pair in zip(debates, claims, strict=True) for claim in pair})
        return [self._winner(topic, pair) for topic, pair in zip(debates, claims, strict=True)]

    def _claim(self, topic: Topic, speech: Speech) -> str:
        said, end = self.tokenizer.decode(speech.tokens), self.tokenizer.eos_token
        return next((word for word in (topic.truth, topic.error) if said == word + end), "")

    def _ask(self, pairs: set[tuple[str, str]]) -> None:
        futures = {}
        for truth, claim in sorted(pairs - self.likely.keys()):
            asked, answer = chat(self.tokenizer, f"say {truth}"), self.tokenizer.encode(claim)
            futures[truth, claim] = (
                len(answer),
                self.sampler.compute_logprobs(types.ModelInput.from_ints(asked + answer)),
            )
        for pair, (size, future) in futures.items():
            self.likely[pair] = sum(future.result()[-size:]) if size else -math.inf

    def _winner(self, topic: Topic, claims: list[str]) -> int | None:
        first, second = (self.likely[topic.truth, claim] for claim in claims)
        return None if first == second else int(second > first)


def datum(speech: Speech, advantage: float) -> Any:
    """The training example for PPO: position i of the input predicts target i; tokens of the prompt have advantage
    0."""
    ids, before = speech.prompt + speech.tokens, [0.0] * (len(speech.prompt) - 1)
    inputs = {
        "target_tokens": ids[1:],
        "logprobs": before + speech.logprobs,
        "advantages": before + [advantage] * len(speech.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def learn(agents: list[Any], decided: list[tuple[list[Speech], int]], adam: Any) -> list[float]:
    """Makes one PPO step of both agents concurrently; returns their losses, means over tokens."""
    futures = []
    for i, agent in enumerate(agents):
        data = [datum(pair[i], WIN if winner == i else LOSE) for pair, winner in decided]
        futures.append((agent.forward_backward(data, "ppo"), agent.optim_step(adam)))
    losses = [passed.result().metrics["loss:sum"] for passed, _ in futures]
    for _, step in futures:
        step.result()
    sizes = [sum(len(pair[i].tokens) for pair, _ in decided) for i in range(len(agents))]
    return [loss / size for loss, size in zip(losses, sizes, strict=True)]


def ready(client: Any) -> Any:
    """Newer client libraries return a future of a client, older ones the client itself; returns the client."""
    return client.result() if hasattr(client, "result") else client


def main() -> None:
    parser = argparse.ArgumentParser(description="Two debaters, one judge, PPO.")
    parser.add_argument("--base-url", default=os.environ.get("MINT_BASE_URL") or os.environ.get("TINKER_BASE_URL"))
    parser.add_argument("--api-key", default=os.environ.get("MINT_API_KEY") or os.environ.get("TINKER_API_KEY"))
    parser.add_argument("--base-model", default=os.environ.get("MINT_BASE_MODEL", "Qwen/Qwen3-0.6B"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--debates", type=int, default=128, help="debates per epoch")
    parser.add_argument("--passes", type=int, default=4, help="PPO steps on each epoch's debates")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--examples", type=int, default=0, help="answered questions before each question")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    service = tinker.ServiceClient(base_url=args.base_url, api_key=args.api_key)
    new = {"base_model": args.base_model, "rank": 16}
    agents = [ready(service.create_lora_training_client(**new, seed=args.seed + i)) for i in range(2)]
    adam = types.AdamParams(learning_rate=args.lr, grad_clip_norm=1.0)
    tokenizer, rng = agents[0].get_tokenizer(), random.Random(args.seed)
    judge = Judge(ready(service.create_sampling_client(base_model=args.base_model)), tokenizer)
    print("epoch   informed wins   loss: informed   guessing")
    for epoch in range(args.epochs):
        debates, speeches = topics(args.debates, rng), []
        for i, agent in enumerate(agents):
            sampler = ready(agent.save_weights_and_get_sampling_client())
            shown = examples(i, args.examples)
            prompts = [chat(tokenizer, topic.prompts()[i], shown) for topic in debates]
            speeches.append(speak(sampler, prompts, [rng.randrange(2**31) for _ in debates]))
        winners = judge.verdicts(debates, speeches)
        decided = [(pair, winner) for *pair, winner in zip(*speeches, winners, strict=True) if winner is not None]
        losses = [0.0, 0.0]
        if decided:
            losses = [learn(agents, decided, adam) for _ in range(args.passes)][-1]
        wins = (winners.count(0) + winners.count(None) / 2) / len(winners)
        print(f"{epoch:5d}   {wins:13.0%}   {losses[0]:14.3f}   {losses[1]:8.3f}", flush=True)


if __name__ == "__main__":
    main()
