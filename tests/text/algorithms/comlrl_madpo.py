"""Pairs and losses of CoMLRL's MADPOTrainer, a JSON object, for test_madpo.py.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 comlrl==1.4.3
    cd tests/text/algorithms && WANDB_MODE=disabled VENV/bin/python comlrl_madpo.py > comlrl_madpo_1.4.3.json

Two agents on the shipped tiny model answer four times; numbers that a generator draws are the rewards of their joint
answers. All pairs are kept, and each agent's loss is computed before any is trained.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from comlrl.trainers.preference import MADPOConfig, MADPOTrainer
from comlrl_numbers import AGENTS, BASE
from transformers import AutoModelForCausalLM, AutoTokenizer

CANDIDATES = 4


def numbers() -> dict[str, Any]:
    """Returns the joint answers, each with its reward and the log-probability of each agent's answer (without its last
    token, which CoMLRL leaves out), and each agent's loss."""
    torch.manual_seed(0)
    rng, rewards = np.random.default_rng(1), []

    def reward(*_: list[str]) -> list[float]:
        rewards.append(round(float(rng.normal()), 3))
        return rewards[-1:]

    trainer = MADPOTrainer(
        agents=[AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32) for _ in range(AGENTS)],
        tokenizer=AutoTokenizer.from_pretrained(BASE),
        reward_func=reward,
        formatters=[lambda item, external_prompts=None: external_prompts or item["prompt"]] * AGENTS,
        args=MADPOConfig(
            preference_num_candidates=CANDIDATES,
            preference_pairs_per_sample=None,
            pair_selection="all",
            max_new_tokens=4,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
        ),
    )
    pairs = trainer._generate_preference_pairs_for_item({"prompt": "1 2 3"})
    deltas = trainer._detached_agent_deltas(pairs)
    losses = [float(trainer._agent_preference_loss(agent, pairs, deltas).detach()) for agent in range(AGENTS)]
    sides = {pair.winner_reward: [own.winner_completion_ids for own in pair.agent_tensors] for pair in pairs}
    sides |= {pair.loser_reward: [own.loser_completion_ids for own in pair.agent_tensors] for pair in pairs}
    prompts = [own.prompt_input_ids for own in pairs[0].agent_tensors]
    joints = [
        {"reward": reward, "logprobs": [logp(trainer, agent, prompts[agent], ids) for agent, ids in enumerate(answers)]}
        for reward, answers in sides.items()
    ]
    return {"beta": trainer.args.dpo_beta, "joints": joints, "losses": losses}


def logp(trainer: Any, agent: int, prompt: torch.Tensor, answer: torch.Tensor) -> float:
    return float(trainer._sequence_log_prob(agent, prompt, answer).detach())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(numbers()) + "\n")
