"""MAGRPO with CoMLRL on SmolLM2: the two agents of results/real/compare.py, in the peers' virtual environment.

The argument is a JSON object with the fields of compare_trl.py's `Task`; the result is printed as one line of JSON.
There are two models with a LoRA adapter each (PEFT), since CoMLRL's agents are whole models. Both answer each problem
at the same time and receive the mean of their rewards. Each step updates each agent once.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from comlrl.trainers.reinforce.magrpo import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from palestra.core.accel.malloc import keep_freed_memory
from results.real.compare_trl import Task, is_right

AGENTS = 2


def reward(first: list[str], second: list[str], *, batch_items: list[dict]) -> list[float]:
    """The share of right answers, for each pair of the two agents' answers."""
    gold = batch_items[0]["gold"]
    return [(is_right(a, gold) + is_right(b, gold)) / AGENTS for a, b in zip(first, second, strict=True)]


class TimedTrainer(MAGRPOTrainer):
    """CoMLRL's trainer; also records the seconds after each problem's answers and updates."""

    def __init__(self, task: Task, **kwargs) -> None:
        super().__init__(**kwargs)
        self.task, self.start, self.seconds = task, task.seconds(), []

    def _train_step_returns(self, *args, **kwargs):
        result = super()._train_step_returns(*args, **kwargs)
        self.seconds.append(self.task.seconds() - self.start)
        return result


def agent(task: Task) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(
        task.model, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    lora = LoraConfig(r=task.rank, lora_alpha=task.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def train(task: Task) -> list[float]:
    """Trains; returns the seconds after each step."""
    problems = json.loads(Path(task.problems).read_text())[: task.steps * task.prompts_per_step]
    config = MAGRPOConfig(
        num_train_epochs=1,
        agent_learning_rate=task.lr,
        num_agents=AGENTS,
        agent_devices=task.device,
        num_generations=task.group_size,
        max_new_tokens=task.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        num_turns=1,
        eval_interval=0,
        rollout_buffer_size=task.prompts_per_step,
        advantage_normalization=False,
    )
    trainer = TimedTrainer(
        task,
        agents=[agent(task) for _ in range(AGENTS)],
        tokenizer=AutoTokenizer.from_pretrained(task.model, padding_side="left", trust_remote_code=False),
        reward_func=reward,
        train_dataset=Dataset.from_list(problems),
        args=config,
    )
    trainer.train()
    return trainer.seconds[task.prompts_per_step - 1 :: task.prompts_per_step]


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.filterwarnings("ignore")
    task = Task(**json.loads(sys.argv[1]))
    print(json.dumps({"seconds": train(task), "gpu_mb": task.gpu_mb()}))


if __name__ == "__main__":
    main()
