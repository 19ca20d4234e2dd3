"""Values and losses of CoMLRL's IACTrainer and MAACTrainer, a JSON object per case, for test_iac_comlrl.py.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 comlrl==1.4.3
    cd tests/text/algorithms && WANDB_MODE=disabled VENV/bin/python comlrl_actor_critic.py > comlrl_iac_1.4.3.jsonl

Two agents on the shipped tiny model, with value heads of known weights; numbers that a generator draws are the rewards
of their joint answers. Each agent's samples are one batch, whose losses are read as its step computes them.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from comlrl.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer
from comlrl_numbers import AGENTS, BASE
from transformers import AutoModelForCausalLM, AutoTokenizer

DISCOUNT = 0.9


def case(name: str, critic: str, critic_type: str, turns: int, generations: int, normalised: bool) -> dict[str, Any]:
    """Returns each agent's samples in the order of their play, and the losses and gradients of their batch."""
    torch.manual_seed(0)
    rng, rewards = np.random.default_rng(1), []

    def reward(*answers: list[str]) -> list[float]:
        drawn = [round(float(rng.normal()), 3) for _ in answers[0]]
        rewards.extend(drawn)
        return drawn

    options: dict[str, Any] = {
        "agent_learning_rate": 0.0,
        "critic_learning_rate": 0.0,
        "rollout_buffer_size": 1000,
        "advantage_normalization": normalised,
        "max_new_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "num_turns": turns,
        "num_generations": generations,
        "discount": DISCOUNT,
        "critic_type": critic_type,
        "early_termination_threshold": None,
    }
    trainer_class, config_class = (IACTrainer, IACConfig) if name == "iac" else (MAACTrainer, MAACConfig)
    if name == "iac":
        options |= {"use_separate_critic": critic == "separate", "value_clip_range": None}
    critics = {"shared": None, "separate": [model() for _ in range(AGENTS)], "central": [model()]}[critic]
    trainer = trainer_class(
        agents=[model() for _ in range(AGENTS)],
        tokenizer=AutoTokenizer.from_pretrained(BASE),
        reward_func=reward,
        formatters=[formatter(agent) for agent in range(AGENTS)],
        external_transition=lambda prompt, agent_completions, num_agents, **_: [prompt + " again"] * num_agents,
        args=config_class(**options),
        **({"critics": critics} if critics else {}),
    )
    for network in [*trainer.agents, *trainer.critics]:
        if network.value_head is not None:
            set_head(network.value_head.value_projection)
    rollouts = trainer._collect_rollouts({"prompt": "1 2 3"})
    agents = [one_agent(trainer, agent, rollouts) for agent in range(AGENTS)]
    settings = {"name": name, "critic": critic, "critic_type": critic_type}
    settings |= {"turns": turns, "generations": generations, "normalised": normalised}
    return settings | {"value_loss_coef": trainer.args.value_loss_coef, "rewards": rewards, "agents": agents}


def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)


def formatter(agent: int) -> Any:
    return lambda item, external_prompts=None: f"agent {agent}: {external_prompts or item['prompt']}"


def set_head(head: torch.nn.Linear) -> None:
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.1, 0.1, head.in_features))
        head.bias.fill_(0.1)


def one_agent(trainer: Any, agent: int, rollouts: list[Any]) -> dict[str, Any]:
    own = [sample for sample in rollouts if sample.agent_idx == agent]
    trainer._prepare_advantages(own)
    with recorded_losses() as losses:
        trainer._ac_step(agent, own)
    actor = trainer.agents[agent]
    critic = trainer.critics[agent if len(trainer.critics) > 1 else 0] if trainer.critics else actor
    gradients = [p.grad for p in actor.model.parameters() if p.grad is not None]
    return {
        "samples": [sample_record(sample) for sample in own],
        "policy_loss": losses[0],
        "value_error": losses[1],
        "head_gradient": float(critic.value_head.value_projection.bias.grad),
        "policy_gradient_norm": float(torch.nn.utils.get_total_norm(gradients)),
    }


@contextmanager
def recorded_losses() -> Iterator[list[float]]:
    """Records the means of the lists that a step stacks: the policy losses of its samples, and their value errors."""
    losses, stack = [], torch.stack

    def record(parts: Any, *more: Any, **options: Any) -> torch.Tensor:
        made = stack(parts, *more, **options)
        losses.append(float(made.mean().detach()))
        return made

    torch.stack = record
    try:
        yield losses
    finally:
        torch.stack = stack


def sample_record(sample: Any) -> dict[str, Any]:
    ids, joint = sample.full_input_ids.tolist(), sample.metadata.get("joint_input_ids")
    end = sample.prompt_len + sample.response_len
    return {
        "turn": sample.metadata["turn_idx"],
        "reward": float(sample.reward),
        "prompt_ids": ids[: sample.prompt_len],
        "token_ids": ids[sample.prompt_len : end],
        "critic_ids": None if joint is None else joint[0].tolist(),
        "logprob": float(sample.old_logprob),
        "value": float(sample.old_value),
        "advantage": float(sample.normalized_advantage),
        "target": float(sample.metadata["value_target"]),
    }


CASES = [
    ("iac", "shared", "v", 1, 3, False),
    ("iac", "shared", "v", 1, 3, True),
    ("iac", "shared", "v", 2, 1, False),
    ("iac", "separate", "v", 1, 3, True),
    ("iac", "separate", "v", 2, 1, False),
    ("maac", "central", "v", 1, 3, True),
    ("maac", "central", "v", 2, 1, False),
    ("iac", "separate", "q", 1, 3, False),
    ("iac", "separate", "q", 2, 1, False),
    ("maac", "central", "q", 1, 3, False),
    ("maac", "central", "q", 2, 1, False),
]

if __name__ == "__main__":
    for each in CASES:
        sys.stdout.write(json.dumps(case(*each)) + "\n")
