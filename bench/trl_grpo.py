"""GRPO steps with TRL on one CPU thread or a GPU, to compare palestra's engine with.

Runs in a virtual environment of its own, so that TRL and its dependencies stay out of palestra's:

    python -m venv bench/.venv-trl
    bench/.venv-trl/bin/pip install torch==2.13.0
    bench/.venv-trl/bin/pip install trl==1.16.0 peft==0.21.2 transformers==5.23.0
    echo '{"model": "DIR", "prompts": "prompts.json"}' | PYTHONPATH=. bench/.venv-trl/bin/python bench/trl_grpo.py

The JSON (on stdin, or as the only argument) has the fields of `Spec`. The result is printed as one line of JSON: that
of the fastest micro-batch size, with the results of all sizes under "tried".

Tuned for speed as far as TRL's own settings allow: float32, no KL term and so no reference model, no gradient
checkpointing, logging, evaluation, saving or data workers, one optimizer step per generation batch, which saves the
second forward pass for the old log-probabilities. Left out are vLLM, and transformers' continuous batching, which took
eight times the CPU seconds of plain `generate` at this size. With `device` "cuda", weights are bfloat16 (or float32, by
`dtype`), and seconds are wall seconds.
"""

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import logging
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from palestra.core.accel.malloc import keep_freed_memory

PACKAGES = ("torch", "trl", "transformers", "peft", "accelerate")


@dataclass(frozen=True)
class Spec:
    """The run to measure. `micro_batches` are rows per forward pass; [] tries K, 2K and 4K (larger ones were
    slower)."""

    model: str
    """Directory of a causal language model and its tokenizer."""
    prompts: str
    """JSON list, or JSON lines, of prompts: token ids or text."""
    K: int = 8
    new_tokens: int = 16
    prompts_per_step: int = 16
    steps: int = 5
    """Steps that are timed, after `warmup` others."""
    warmup: int = 2
    rank: int = 8
    """LoRA rank; 0 trains every weight."""
    alpha: int = 16
    targets: str | list[str] = "all-linear"
    lr: float = 1e-3
    seed: int = 0
    micro_batches: tuple[int, ...] = ()
    generation_batch: int = 0
    """Rows generated at once; 0 is the whole step."""
    attention: str = "sdpa"
    gradient_checkpointing: bool = False
    device: str = "cpu"
    dtype: str = ""
    """Type of the weights and of all arithmetic; empty: float32 on a CPU, bfloat16 on a GPU."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype or ("float32" if self.device == "cpu" else "bfloat16"))


def even_share(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Rewards in 0..1: the share of even token ids. Cheap, deterministic, and different within nearly every group."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def seconds() -> float:
    """CPU seconds of this process, or wall seconds once it uses a GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


class TimedTrainer(GRPOTrainer):
    """TRL's trainer; also sums the seconds spent in generation and counts the sampled tokens."""

    generation_s = 0.0
    sampled = 0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = seconds()
        completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        self.generation_s += seconds() - start
        self.sampled += sum(map(len, completion_ids))
        return completion_ids, logprobs


class StepClock(TrainerCallback):  # type: ignore[misc]  # no types
    """Records `(seconds, seconds in generation, sampled tokens)` after every optimizer step."""

    def __init__(self) -> None:
        self.trainer: Any = None  # the TimedTrainer, which takes this callback
        self.readings: list[tuple[float, float, int]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.readings.append((seconds(), self.trainer.generation_s, self.trainer.sampled))


def read_prompts(path: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Prompts as text. Raises ValueError if decoding and encoding changes a prompt's token ids."""
    text = Path(path).read_text()
    prompts = json.loads(text) if text.lstrip()[:2].replace(" ", "") in ("[[", '["') else None
    if prompts is None:
        prompts = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [prompt if isinstance(prompt, str) else _as_text(prompt, tokenizer) for prompt in prompts]


def _as_text(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode(ids)
    if tokenizer(text)["input_ids"] != ids:
        raise ValueError(f"the tokenizer does not give {ids[:8]}... back from {text[:40]!r}: pass the prompts as text")
    return text


def build_config(spec: Spec, micro_batch: int, output_dir: str) -> GRPOConfig:
    """TRL's settings for one optimizer step per `prompts_per_step * K` samples."""
    rows = spec.prompts_per_step * spec.K
    return GRPOConfig(
        output_dir=output_dir,
        use_cpu=spec.device == "cpu",
        bf16=spec.torch_dtype == torch.bfloat16,
        seed=spec.seed,
        beta=0.0,
        learning_rate=spec.lr,
        lr_scheduler_type="constant",
        max_steps=spec.warmup + spec.steps,
        num_generations=spec.K,
        max_completion_length=spec.new_tokens,
        generation_kwargs={"min_new_tokens": spec.new_tokens},
        temperature=1.0,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        steps_per_generation=(spec.generation_batch or rows) // micro_batch,
        gradient_checkpointing=spec.gradient_checkpointing,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
    )


def build_trainer(spec: Spec, micro_batch: int, clock: StepClock, output_dir: str) -> TimedTrainer:
    """A trainer with as many prompts as the run needs; the file's prompts are repeated in order."""
    tokenizer = AutoTokenizer.from_pretrained(spec.model, padding_side="left", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        spec.model, dtype=spec.torch_dtype, attn_implementation=spec.attention, trust_remote_code=False
    )
    prompts = read_prompts(spec.prompts, tokenizer)
    needed = (spec.warmup + spec.steps) * spec.prompts_per_step
    rows = [{"prompt": prompts[i % len(prompts)]} for i in range(needed)]
    lora = LoraConfig(
        r=spec.rank, lora_alpha=spec.alpha, target_modules=spec.targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    clock.trainer = TimedTrainer(
        model=model,
        reward_funcs=even_share,
        args=build_config(spec, micro_batch, output_dir),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora if spec.rank else None,
        callbacks=[clock],
    )
    clock.trainer.remove_callback(PrinterCallback)
    return clock.trainer


def run_steps(spec: Spec, micro_batch: int) -> dict[str, float]:
    """Speed and memory of the steps after the warm-up, with one micro-batch size."""
    clock = StepClock()
    with tempfile.TemporaryDirectory() as output_dir:
        build_trainer(spec, micro_batch, clock, output_dir).train()
    (start, generation_start, sampled_start), (end, generation_end, sampled_end) = (
        clock.readings[spec.warmup - 1],
        clock.readings[-1],
    )
    total, generation = end - start, generation_end - generation_start
    samples = spec.steps * spec.prompts_per_step * spec.K
    return {
        "micro_batch": micro_batch,
        "samples_per_cpu_s": samples / total if samples else 0.0,
        "samples": samples,
        "sampled_tokens": sampled_end - sampled_start,
        "cpu_s": total,
        "cpu_s_generation": generation,
        "cpu_s_rest": total - generation,
        "peak_gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if spec.device != "cpu" else 0.0,
        "peak_rss_mb": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024,
    }


def compare(spec: Spec) -> dict[str, object]:
    """The result of the fastest micro-batch size. Sizes are tried in ascending order, since a peak of memory is that of
    the process so far."""
    rows = spec.prompts_per_step * spec.K
    sizes = sorted(
        spec.micro_batches or (spec.K * groups for groups in (1, 2, 4) if spec.prompts_per_step % groups == 0)
    )
    bad = [size for size in sizes if size < 1 or (spec.generation_batch or rows) % size]
    if bad or spec.warmup < 1 or rows % (spec.generation_batch or rows):
        raise ValueError(
            f"micro_batches {bad or sizes} must divide generation_batch, which must divide {rows}; warmup must be >= 1"
        )
    tried = [run_steps(spec, size) for size in sizes]
    best = max(tried, key=lambda result: result["samples_per_cpu_s"])
    versions = {name: version(name) for name in PACKAGES}
    return best | {"tried": tried, "spec": asdict(spec), "versions": versions}


def main() -> None:
    """Reads a `Spec` as JSON and prints the result as one line of JSON."""
    torch.set_num_threads(1)
    keep_freed_memory()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    given = json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read())
    print(json.dumps(compare(Spec(**given))))


if __name__ == "__main__":
    main()
