"""AT-GRPO (Zhao et al., 2025, arXiv:2510.11062) for two agents in one file, to read top to bottom.

    python examples/grpo_by_hand.py --steps 30 --seed 0

A planner and an executor, each a LoRA adapter on the same small base, walk to a goal on a grid (Plan-Path): the planner
names cells, the executor answers with moves. Every answer is sampled GROUP_SIZE times and each sibling is tried on a
copy of the game; siblings are compared with each other, and the game continues from the best.

The game and the engine are palestra's: the model, the sampler (all games and both adapters in one batch) and the
trainer (log-probabilities, gradients, AdamW). Rollout, advantages and loss are written out here. `palestra train
configs/demo.yaml` is the same algorithm with what this file leaves out: evaluation on a second held-out set,
checkpoints and resume, recorded episodes, failed games, agents with a history, seats that act simultaneously, other
baselines and losses, KL penalties, and training on several devices.

tests/project/test_by_hand.py checks that this file and the library compute the same gradients from the same episodes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palestra.core.losses import LossInputs
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Completion, Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.micro_batch import by_prompt
from palestra.envs.text.grid.plan_path import PlanPath

SEATS = ("planner", "executor")
GROUP_SIZE = 8  # answers to each observation
BATCH_SIZE = 256  # samples per optimizer step
CLIP = 0.2  # clipping distance of the probability ratio from 1
ENTROPY_COEF = 0.06
LORA = LoraConfig(rank=8, alpha=16.0)
LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 1.0
SAMPLING = SamplingConfig(max_tokens=9, temperature=1.0)


@dataclass(frozen=True)
class Group:
    """Siblings: the answers of `seat` to one prompt `prompt_ids` [P] int32, and the value of each."""

    seat: str
    prompt_ids: np.ndarray
    answers: Sequence[Completion]
    values: Sequence[float]


# ---- rollout


def play(
    sampler: Sampler,
    trainers: Mapping[str, AdapterWeights],
    instances: Sequence[int],
    split: Any,
    group_size: int,
    seed: int,
) -> tuple[list[Group], float]:
    """Plays a game of each instance, all in one batch; returns the groups, and the share of games that were solved.

    With a group size of 1 there is no choice among siblings: the agents play as in an evaluation.
    """
    engine, rng = sampler.engine, random.Random(seed)
    adapters = {seat: trainer.snapshot(seat) for seat, trainer in trainers.items()}
    games = [PlanPath(size=7, wall_density=0.1, split=split) for _ in instances]
    steps = [game.reset(instance) for game, instance in zip(games, instances, strict=True)]
    groups: list[Group] = []
    while running := [i for i, step in enumerate(steps) if not step.done]:
        seats = [next(iter(steps[i].observations)) for i in running]  # one seat acts at a time
        requests = [
            Request(
                encode(engine.tokenizer, games[i].roles[seat], steps[i].observations[seat]),
                group_size,
                SAMPLING,
                adapters[seat],
                seed=rng.getrandbits(63),
            )
            for i, seat in zip(running, seats, strict=True)
        ]
        answers = sampler.sample_all(requests)
        for i, seat, request, siblings in zip(running, seats, requests, answers, strict=True):
            texts = engine.tokenizer.batch_decode([a.token_ids for a in siblings], skip_special_tokens=True)
            forks = [games[i].fork() for _ in siblings]
            tried = [fork.step({seat: text}) for fork, text in zip(forks, texts, strict=True)]
            values = [step.team_reward + step.rewards[seat] for step in tried]
            groups.append(Group(seat, request.prompt_ids, siblings, values))
            best = int(np.argmax(values))
            games[i], steps[i] = forks[best], tried[best]
    return groups, float(np.mean([step.info["success"] for step in steps]))


def encode(tokenizer: Any, role: str, observation: str) -> np.ndarray:
    """Returns the prompt [P] int32: the seat's role as the system message, and the observation."""
    messages = [{"role": "system", "content": role}, {"role": "user", "content": observation}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


# ---- credit and loss


def build_samples(groups: Sequence[Group], seat: str) -> list[Sample]:
    """Returns the training samples of one agent: the answers with an advantage, which is the same for all tokens."""
    samples = []
    for group in groups:
        if group.seat == seat:
            for answer, advantage in zip(group.answers, group_advantages(group.values), strict=True):
                if advantage:
                    advantages_T = np.full(len(answer.token_ids), advantage, np.float32)
                    samples.append(Sample(group.prompt_ids, answer.token_ids, answer.logprobs, advantages_T))
    return samples


def group_advantages(values: Sequence[float]) -> np.ndarray:
    """Returns each value minus the group's mean, not divided by the standard deviation (Liu et al., 2025); zeros if the
    values differ only by rounding errors."""
    advantages = np.array(values) - np.mean(values)
    return advantages if advantages.std() > 1e-8 else np.zeros(len(values))


def grpo_loss(tokens: LossInputs, *, entropy: float) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (Schulman et al., 2017, eq. 7), negated, minus an entropy bonus, averaged over tokens:
    `weight_M` is each token's share of the mean over the batch."""
    ratio_M = torch.exp(tokens.logp_M - tokens.old_logp_M)
    clipped_M = ratio_M.clamp(1 - CLIP, 1 + CLIP)
    gain_M = torch.minimum(ratio_M * tokens.advantage_M, clipped_M * tokens.advantage_M)
    loss = -(tokens.weight_M * (gain_M + entropy * tokens.entropy_M)).sum()
    return loss, {"entropy": (tokens.weight_M * tokens.entropy_M).sum().detach()}


def update(trainer: AdapterWeights, samples: Sequence[Sample], lr: float) -> float:
    """Trains one agent on its samples, with an optimizer step per batch; returns the entropy per token, in nats.
    Answers to one prompt are in one batch, which computes the prompt once."""
    count = -(-len(samples) // BATCH_SIZE)
    prompts = by_prompt(samples)
    order = np.random.default_rng(len(prompts)).permutation(len(prompts))
    entropies, tokens = [], []
    for i in range(count):
        batch = [sample for k in sorted(order[i::count]) for sample in prompts[k]]
        metrics = trainer.forward_backward(batch, grpo_loss, entropy=ENTROPY_COEF)
        trainer.optim_step(OptimConfig(lr=lr, max_grad_norm=MAX_GRAD_NORM))
        entropies.append(metrics["entropy"])
        tokens.append(sum(len(sample.token_ids) for sample in batch))
    return float(np.average(entropies, weights=tokens)) if entropies else 0.0


# ---- the loop


def make_trainers(engine: Engine, seed: int) -> dict[str, AdapterWeights]:
    """Returns a trainer for each agent: two adapters on one base."""
    return {
        seat: AdapterWeights(engine, Adapter(engine.linear_layers, LORA, seed=seed + i)) for i, seat in enumerate(SEATS)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="AT-GRPO for a planner and an executor.")
    parser.add_argument("--steps", type=int, default=30, help="rounds of playing and training")
    parser.add_argument("--episodes", type=int, default=32, help="games per step")
    parser.add_argument("--eval-episodes", type=int, default=200, help="held-out games before and after training")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    engine = Engine.load("tiny")
    sampler, trainers = Sampler(engine), make_trainers(engine, args.seed)

    def evaluate() -> float:
        return play(sampler, trainers, range(args.eval_episodes), "test", 1, args.seed)[1]

    start, before = time.perf_counter(), evaluate()
    print(f"solved before training: {before:.1%} of {args.eval_episodes} held-out games", flush=True)
    for step in range(args.steps):
        instances = range(step * args.episodes, (step + 1) * args.episodes)
        groups, solved = play(sampler, trainers, instances, "train", GROUP_SIZE, args.seed + step)
        lr = LEARNING_RATE * (1 - step / args.steps)
        entropy = {seat: update(trainer, build_samples(groups, seat), lr) for seat, trainer in trainers.items()}
        sampler.clear_cache()  # it has keys and values of the old weights
        value = {seat: np.mean([group.values for group in groups if group.seat == seat]) for seat in SEATS}
        line = "   ".join(f"{seat} value {value[seat]:5.2f} entropy {entropy[seat]:.2f}" for seat in SEATS)
        print(
            f"step {step + 1:3d}   {line}   best siblings solved {solved:4.0%}   {time.perf_counter() - start:4.0f} s",
            flush=True,
        )
    print(f"solved after training: {evaluate():.1%} of {args.eval_episodes} held-out games (before: {before:.1%})")


if __name__ == "__main__":
    main()
