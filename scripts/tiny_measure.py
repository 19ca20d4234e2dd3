"""Measures the base model `tiny` before reinforcement learning: success in play, valid answers, right answers to
questions.

    python scripts/tiny_measure.py --model palestra/data/bases/tiny

Boards are of split dev, which is not in the training data. Answers in play are sampled at temperature 1; questions are
answered greedily.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch
from tiny_data import Example, play
from transformers import AutoModelForCausalLM

from palestra.engine.bases.pretrained import load_model, load_tokenizer
from palestra.envs import make_env
from palestra.envs.text.grid.grid import parse_moves

GAMES = {
    "sokoban 4x4": ("sokoban", {"size": 4}),
    "sokoban 5x5": ("sokoban", {"size": 5}),
    "plan_path 5x5": ("plan_path", {"size": 5}),
    "plan_path 10x10": ("plan_path", {"size": 10}),
}


class Speaker:
    """The model with its tokenizer, which answers prompts."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(AutoModelForCausalLM, str(folder)).eval()
        self.tokenizer = load_tokenizer(str(folder), padding_side="left")

    @torch.inference_mode()
    def answers(self, prompts: list[str], *, sample: bool, longest: int) -> list[str]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
        out_BT = self.model.generate(**inputs, max_new_tokens=longest, **how)
        return self.tokenizer.batch_decode(out_BT[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def measure_play(speaker: Speaker, game: str, options: dict[str, Any], episodes: int, split: str) -> dict[str, float]:
    """Success over `episodes` layouts, and for each seat the shares of answers that can be parsed (`readable`) and that
    are valid (`faultless`)."""
    envs = [make_env(game, split=split, **options) for _ in range(episodes)]
    steps = [env.reset(seed) for seed, env in enumerate(envs)]
    figures: dict[str, list[float]] = defaultdict(list)
    wins = 0.0
    while live := [i for i in range(episodes) if not steps[i].done]:
        seats = [next(iter(steps[i].observations)) for i in live]
        prompts = [prompt(envs[i].roles[s], steps[i].observations[s]) for i, s in zip(live, seats, strict=True)]
        figures["prompt tokens"].append(mean(len(ids) for ids in speaker.tokenizer(prompts)["input_ids"]))
        for i, seat, said in zip(live, seats, speaker.answers(prompts, sample=True, longest=12), strict=True):
            read = envs[i].parse_plan(said) if seat == "planner" else parse_moves(said, envs[i].moves)
            steps[i] = envs[i].step({seat: said})
            figures[f"{seat} readable"].append(read is not None)
            figures[f"{seat} faultless"].append(not steps[i].info["invalid"])
            wins += steps[i].done and steps[i].info["success"]
    return {"success": wins / episodes} | {name: mean(values) for name, values in figures.items()}


def prompt(role: str, question: str) -> str:
    return Example("", role, question, "").prompt


def measure_questions(speaker: Speaker, count: int, size: int) -> dict[str, float]:
    """The share of exactly right answers to questions about dev boards of one size, by kind of question."""
    rng = Random(99)
    kinds: defaultdict[str, list[Example]] = defaultdict(list)
    while sum(map(len, kinds.values())) < count:
        for game in ("sokoban", "plan_path"):
            for example in (e for run in play(game, rng, "dev") for e in run):
                if example.question.startswith(f"size {size} ") and example.role.split()[1] in QUESTIONS:
                    kinds[example.kind].append(example)
    figures = {}
    for kind, asked in sorted(kinds.items()):
        said = speaker.answers([prompt(e.role, e.question) for e in asked], sample=False, longest=45)
        figures[kind] = mean(answer == example.answer for answer, example in zip(said, asked, strict=True))
    return figures


QUESTIONS = ("moves", "end", "legal", "stand", "line")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("palestra/data/bases/tiny"))
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--questions", type=int, default=600)
    parser.add_argument("--split", default="dev")
    parser.add_argument("--quick", action="store_true", help="a smoke test: two episodes and questions")
    options = parser.parse_args()
    if options.quick:
        options.episodes, options.questions = 2, 2
    torch.set_num_threads(1)
    torch.manual_seed(0)
    speaker = Speaker(options.model)
    for title, (game, settings) in GAMES.items():
        show(title, measure_play(speaker, game, settings, options.episodes, options.split))
    for size in (4, 5):
        show(f"questions {size}x{size}", measure_questions(speaker, options.questions, size))


def show(title: str, figures: dict[str, float]) -> None:
    print(f"{title:16s}", "  ".join(f"{name} {value:.3f}" for name, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
