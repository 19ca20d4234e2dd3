"""GRPO with TRL on SmolLM2: the single agent of results/real/compare.py, in TRL's own virtual environment.

The argument is a JSON object with the fields of `Task`; the result is printed as one line of JSON. LoRA through PEFT,
float32, one thread; settings as in trl_grpo.py, but the model may end an answer. On a GPU, a step is one micro-batch.
With `save_every`, adapters are saved in `folder`/STEPS, and the seconds do not include saving.
"""

import json
import logging
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from bench.trl_grpo import Spec, build_config
from palestra.core.accel.malloc import keep_freed_memory
from palestra.environments.math.grading import grade_directly
from palestra.environments.math.review import last_number


@dataclass(frozen=True)
class Task:
    """The run to train. `problems` is a JSON file of rows with `prompt` (text after the chat template) and `gold`."""

    model: str
    problems: str
    folder: str
    group_size: int
    prompts_per_step: int
    max_tokens: int
    steps: int
    rank: int
    lr: float
    seed: int = 0
    save_every: int = 0
    device: str = "cpu"

    def seconds(self) -> float:
        """CPU seconds of this process; on a GPU wall seconds, after its pending work is done."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def gpu_mb(self) -> float | None:
        """The peak of GPU memory that this process had allocated, in MB; None on a CPU."""
        return None if self.device == "cpu" else torch.cuda.max_memory_allocated() / 2**20


def is_right(completion: str, gold: str) -> bool:
    """True if the completion's last number is `gold`, as `math_review` grades it."""
    grade = grade_directly(last_number(completion), gold)
    return grade is not None and grade.is_correct


def reward(completions: list[str], gold: list[str], **_: object) -> list[float]:
    return [float(is_right(completion, right)) for completion, right in zip(completions, gold, strict=True)]


class Recorder(TrainerCallback):
    """Seconds from the start of training to the end of each step, without saving adapters."""

    def __init__(self, task: Task) -> None:
        self.task, self.seconds, self.start = task, [], 0.0

    def on_train_begin(self, *args, **kwargs) -> None:
        self.start = self.task.seconds()

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        self.seconds.append(self.task.seconds() - self.start)
        if self.task.save_every and state.global_step % self.task.save_every == 0:
            model.save_pretrained(Path(self.task.folder) / str(state.global_step))
        self.start = self.task.seconds() - self.seconds[-1]


def train(task: Task) -> list[float]:
    """Trains; returns the seconds after each step."""
    # Each prompt is used once; a step has one optimizer update. A pass has two groups, on a GPU all of them.
    spec = Spec(
        model=task.model,
        prompts=task.problems,
        K=task.group_size,
        new_tokens=task.max_tokens,
        prompts_per_step=task.prompts_per_step,
        steps=task.steps,
        warmup=0,
        lr=task.lr,
        device=task.device,
        dtype="float32",
    )
    groups = task.prompts_per_step if task.device == "cuda" else min(2, task.prompts_per_step)
    tokenizer = AutoTokenizer.from_pretrained(task.model, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        task.model, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    lora = LoraConfig(r=task.rank, lora_alpha=task.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    recorder = Recorder(task)
    with tempfile.TemporaryDirectory() as output:
        config = build_config(spec, groups * task.group_size, output)
        config.generation_kwargs, config.seed, config.scale_rewards = {}, task.seed, "none"
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(json.loads(Path(task.problems).read_text())),
            processing_class=tokenizer,
            peft_config=lora,
            callbacks=[recorder],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return recorder.seconds


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    task = Task(**json.loads(sys.argv[1]))
    print(json.dumps({"seconds": train(task), "gpu_mb": task.gpu_mb()}))


if __name__ == "__main__":
    main()
