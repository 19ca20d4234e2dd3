"""Returns and losses of CoMLRL's trainers, a JSON object per case, for test_against_comlrl.py.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 comlrl==1.4.3
    cd tests/text/algorithms && WANDB_MODE=disabled VENV/bin/python comlrl_numbers.py > comlrl_1.4.3.jsonl

Its trainers run on the shipped tiny model: two agents of three generations each, whose joint answers earn numbers that
a generator draws. Their buffers are read before they are trained on.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comlrl.trainers.reinforce import MAGRPOTrainer, MAREINFORCETrainer, MAReMaxTrainer, MARLOOTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer

TRAINERS = {
    "magrpo": MAGRPOTrainer,
    "mareinforce": MAREINFORCETrainer,
    "marloo": MARLOOTrainer,
    "maremax": MAReMaxTrainer,
}
BASE = Path(__file__).parents[3] / "palestra/data/bases/tiny"
AGENTS, GENERATIONS = 2, 3


def case(name: str, joint_mode: str, turns: int, normalised: bool) -> dict[str, Any]:
    """Returns the nodes of one rollout tree in the order of their play: the rewards of the joint answers, and per agent
    the returns, each answer's log-probability, and the loss."""
    torch.manual_seed(0)
    rng, rewards = np.random.default_rng(1), []

    def reward(*_: list[str]) -> list[float]:
        rewards.append(round(float(rng.normal()), 3))
        return rewards[-1:]

    trainer_class = TRAINERS[name]
    trainer = trainer_class(
        agents=[AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32) for _ in range(AGENTS)],
        tokenizer=AutoTokenizer.from_pretrained(BASE),
        reward_func=reward,
        formatters=[lambda item, external_prompts=None: external_prompts or item["prompt"]] * AGENTS,
        external_transition=lambda prompt, agent_completions, num_agents, **_: [prompt + " again"] * num_agents,
        args=trainer_class.default_config_cls(
            num_generations=GENERATIONS,
            num_turns=turns,
            joint_mode=joint_mode,
            advantage_normalization=normalised,
            early_termination_threshold=None,
            max_new_tokens=4,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            rollout_buffer_size=1000,
        ),
    )
    trainer._train_step_returns({"prompt": "1 2 3"})
    agents = [sorted(buffer, key=lambda sample: sample.node_env_step) for buffer in trainer.rollout_buffers]
    joint = len(rewards) // len(agents[0])
    nodes = [
        {
            "turn": samples[0].turn_idx,
            "rewards": rewards[number * joint : (number + 1) * joint],
            "agents": [sample_record(trainer, agent, sample) for agent, sample in enumerate(samples)],
        }
        for number, samples in enumerate(zip(*agents, strict=True))
    ]
    return {"name": name, "joint_mode": joint_mode, "turns": turns, "normalised": normalised, "nodes": nodes}


def sample_record(trainer: Any, agent: int, sample: Any) -> dict[str, Any]:
    model, data = trainer.agents[agent], sample.completions_data
    loss = trainer._compute_loss_with_gradients(model, data, sample.returns)
    prompt = data["prompt_input_ids"][0]
    return {
        "returns": sample.returns,
        "logprobs": [logprob(model, prompt, answer) for answer in data["completion_input_ids"][0]],
        "loss": float(loss.detach()),
    }


@torch.no_grad()
def logprob(model: Any, prompt: torch.Tensor, answer: torch.Tensor) -> float:
    """Returns the log-probability of all but the last token: CoMLRL's loss leaves that out."""
    logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -2]
    return float(logits.log_softmax(-1).gather(1, answer[:-1, None]).sum())


CASES = [
    *(
        (name, mode, 1, normalised)
        for name in TRAINERS
        for mode in ("aligned", "cross")
        for normalised in (False, True)
    ),
    *((name, "aligned", 2, False) for name in TRAINERS),
    ("magrpo", "cross", 2, False),
]

if __name__ == "__main__":
    for each in CASES:
        sys.stdout.write(json.dumps(case(*each)) + "\n")
