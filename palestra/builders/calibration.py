"""Measures the costs of a machine (`Machine`) by a short probe: the engine's own passes on three small models.

The probe times prompts, answers, training passes and optimizer steps of three decoders with random weights, and a few
whole steps of a run of the shipped base. Non-negative least squares on relative errors gives the seconds of each unit
of work. On a CPU they are CPU seconds of one thread.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from palestra.builders.capacity import (
    UNITS,
    DecoderLoad,
    Machine,
    TrainingLoad,
    Work,
    decode_work,
    optimizer_work,
    prefill_work,
    publish_work,
    training_work,
)
from palestra.builders.capacity_phases import step_work
from palestra.builders.capacity_probe import probe_episodes
from palestra.builders.capacity_workload import build_workload, decoder_load
from palestra.builders.text import build
from palestra.builders.text_config import TextConfig
from palestra.config import dump, validate
from palestra.engine.bases import resolve_base
from palestra.engine.devices import resolve_device
from palestra.engine.lora import Adapter, LoraConfig
from palestra.engine.memory import shape_of
from palestra.engine.models import Engine
from palestra.engine.sampler import Request, Sampler, SamplingConfig
from palestra.engine.trainer import AdamConfig, Trainer
from palestra.envs.base import Env
from palestra.losses.policy import clipped_policy_loss
from palestra.runs import Run
from palestra.training.loop import Callback, run_training
from palestra.types import Metrics, Sample, Step

CACHE_BYTES = 16 * 2**20  # weights up to this size are assumed to stay in a cache of the CPU
RANK, GROUP = 8, 8
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8, "vocab_size": 512}
LARGE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 512}
WORDY = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 32768}
"""Shapes that separate the costs: many small layers, layers that fit into no cache, a large vocabulary."""


@dataclass(frozen=True)
class SampledProbe:
    """A probe of sampling: `prompts` prompts with `group` answers each, under `adapters` adapters."""

    prompts: int
    prompt_tokens: int
    group: int
    answer_tokens: int
    adapters: int = 1

    def work(self, load: DecoderLoad) -> Work:
        """Work of the probe, with the snapshots of its adapters."""
        mixed = self.adapters > 1
        first = prefill_work(load, self.prompts, self.prompt_tokens, mixed=mixed)
        answers = self.prompts * self.group
        rest = decode_work(load, answers, self.answer_tokens, prompt=self.prompt_tokens, mixed=mixed)
        return first + rest + self.adapters * publish_work(load)


SAMPLED = (
    SampledProbe(2, 64, 1, 1),
    SampledProbe(16, 64, 1, 1),
    SampledProbe(2, 24, 2, 8),
    SampledProbe(4, 24, 8, 8),
    SampledProbe(4, 24, 8, 8, 4),
    SampledProbe(3, 256, 4, 6),
)
TRAINED = (TrainingLoad(1, 8, 24, 4, 1), TrainingLoad(3, 24, 32, 12, 1), TrainingLoad(1, 4, 192, 12, 1))
PROBES = ((SMALL, SAMPLED, TRAINED), (LARGE, SAMPLED, TRAINED), (WORDY, SAMPLED[2:4], TRAINED[:2]))
STEPS = ((2, 2), (16, 8))  # whole steps: episodes, group size


class NoiseEnv(Env):
    """An env for probes and benchmarks: each of `turns` turns shows every seat `letters` random letters and rewards it
    by a hash of its answer. A step waits `seconds`."""

    name = "noise"
    blocking = True

    def __init__(self, *, turns: int = 1, seconds: float = 0.0, letters: int = 24, num_seats: int = 1) -> None:
        self.turns, self.seconds, self.letters = turns, seconds, letters
        self.seats = tuple(f"agent{i}" for i in range(num_seats))
        self.roles = dict.fromkeys(self.seats, "s")

    def reset(self, seed: int) -> Step:
        self.rng, self.left = random.Random(seed), self.turns
        return Step(self._ask())

    def step(self, actions: dict[str, Any]) -> Step:
        if self.seconds:
            time.sleep(self.seconds)
        self.left -= 1
        rewards = {seat: float(sum(map(ord, text)) % 97) for seat, text in actions.items()}
        return Step(self._ask() if self.left else {}, rewards)

    def _ask(self) -> dict[str, str]:
        return {seat: "".join(self.rng.choices("abcdefgh", k=self.letters)) for seat in self.seats}


@dataclass(frozen=True)
class Observation:
    """Seconds that an amount of work took."""

    work: Work
    seconds: float


def fit_costs(observations: Sequence[Observation]) -> dict[str, float]:
    """Returns the seconds of one unit of each kind of work, at least 0, by least squares of relative errors."""
    amounts = np.array([[getattr(each.work, unit) for unit in UNITS] for each in observations])
    scaled = amounts / np.array([each.seconds for each in observations])[:, None]
    size = np.maximum(scaled.max(0), 1e-300)
    found, _ = nnls(scaled / size, np.ones(len(scaled)))
    return dict(zip(UNITS, (found / size).tolist(), strict=True))


class Calibration:
    """The probe of `device`. Its models are built once and serve any number of measurements."""

    def __init__(self, device: str = "auto") -> None:
        self.device = resolve_device(device)
        torch.set_num_threads(1)
        self.clock = time.process_time if self.device == "cpu" else _synchronised_clock
        self.models = [
            ProbedModel(shape, sampled, trained, self.clock, self.device) for shape, sampled, trained in PROBES
        ]
        self.episode = replace(probe_episodes(self._config(1, 2)), env_cpu_s=0.0)  # counted in the cost of an answer

    def measure(self, repeats: int = 1) -> Machine:
        """Returns this machine's current costs; each probe's seconds are a median of `repeats`."""
        wall, work = time.perf_counter(), self.clock()
        costs = fit_costs(self.observations(repeats))
        wall, work = time.perf_counter() - wall, self.clock() - work
        return Machine(
            self.device,
            costs,
            slowdown=max(1.0, wall / work),
            cache_bytes=CACHE_BYTES if self.device == "cpu" else 0.0,
            overlaps=self.device != "cpu",
            note="measured here by a probe",
        )

    def observations(self, repeats: int = 1) -> list[Observation]:
        """Returns the probes of all models and of whole steps, with their seconds."""
        found = [each for model in self.models for each in model.observations(repeats)]
        return found + [self._steps(episodes, group) for episodes, group in STEPS]

    def _steps(self, episodes: int, group: int) -> Observation:
        """Returns the work of one step of a run, and its seconds: the median of all steps but the first."""
        config = self._config(episodes, group)
        workload = build_workload(config, self.episode, device=self.device, cache_bytes=CACHE_BYTES)
        with tempfile.TemporaryDirectory() as root, Run.create(root, dump(config)) as run:
            watch = _StepClock(self.clock)
            run_training(build(config), run, watch)
        return Observation(step_work(workload), statistics.median(watch.seconds[1:]))

    def _config(self, episodes: int, group: int) -> TextConfig:
        sampling = {"max_tokens": 8, "stop_at_eos": False}
        return noise_config({"base": "tiny", "sampling": sampling}, episodes, group, device=self.device, steps=3)


def _synchronised_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


class _StepClock(Callback):
    """Measures the seconds of each step of a run: CPU time, or wall-clock time with a GPU."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.last = clock, clock()
        self.seconds: list[float] = []

    def on_step(self, step: int, metrics: Mapping[str, Metrics]) -> None:
        now = self.clock()
        self.seconds.append(now - self.last)
        self.last = now


class ProbedModel:
    """A decoder with random weights, and its probes."""

    def __init__(
        self,
        shape: dict[str, int],
        sampled: Sequence[SampledProbe],
        trained: Sequence[TrainingLoad],
        clock: Callable[[], float],
        device: str,
    ) -> None:
        self.sampled, self.trained = sampled, trained
        config = Qwen3Config(
            **shape,
            num_attention_heads=shape["hidden_size"] // 32,
            num_key_value_heads=shape["hidden_size"] // 64,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            eos_token_id=4,
        )
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Qwen3ForCausalLM(config).to(device, dtype).eval().requires_grad_(False)
        self.engine = Engine(model, AutoTokenizer.from_pretrained(resolve_base("tiny")), "probe")
        self.sampler, self.clock, self.vocab = Sampler(self.engine), clock, shape["vocab_size"]
        lora, size = LoraConfig(rank=RANK), dtype.itemsize
        self.adapters = [
            Adapter(self.engine.linear_layers, lora, seed=i) for i in range(max(p.adapters for p in sampled))
        ]
        self.trainer = Trainer(self.engine, self.adapters[0])
        self.load = decoder_load(shape_of(model), lora, size)
        on_cpu = device == "cpu"
        self.load = replace(self.load, cache_bytes=CACHE_BYTES if on_cpu else 0.0, graphs=not on_cpu)
        self.rng = np.random.default_rng(0)

    def observations(self, repeats: int) -> Iterator[Observation]:
        """Yields the probes of sampling, training and the optimizer, with their seconds."""
        for probe in self.sampled:
            yield Observation(probe.work(self.load), self._seconds(partial(self._sample, probe), repeats))
        for batch in self.trained:
            samples = self._samples(batch)
            work = training_work(self.load, batch) + optimizer_work(self.load)
            yield Observation(work, self._seconds(partial(self._train, samples), repeats))
        yield Observation(optimizer_work(self.load), self._seconds(self._step, repeats))

    def _seconds(self, run: Callable[[], object], repeats: int) -> float:
        run()
        found = []
        for _ in range(repeats):
            start = self.clock()
            run()
            found.append(self.clock() - start)
        return statistics.median(found)

    def _ids(self, count: int) -> np.ndarray:
        return self.rng.integers(5, self.vocab, count).astype(np.int32)

    def _sample(self, probe: SampledProbe) -> None:
        """Samples answers with new snapshots of the adapters, as a step of a run does."""
        self.sampler.clear_cache()
        snapshots = [adapter.snapshot(str(i)) for i, adapter in enumerate(self.adapters[: probe.adapters])]
        sampling = SamplingConfig(max_tokens=probe.answer_tokens, stop_at_eos=False)
        self.sampler.sample_all(
            [
                Request(self._ids(probe.prompt_tokens), probe.group, sampling, snapshots[i % probe.adapters], seed=i)
                for i in range(probe.prompts)
            ]
        )

    def _samples(self, batch: TrainingLoad) -> list[Sample]:
        """Returns random samples of the sizes of `batch`."""
        samples = []
        for _ in range(int(batch.prompts)):
            prompt = self._ids(int(batch.prompt_tokens))
            for _ in range(int(batch.answers / batch.prompts)):
                advantages = self.rng.normal(size=int(batch.answer_tokens)).astype(np.float32)
                ids = self._ids(int(batch.answer_tokens))
                samples.append(Sample(prompt, ids, np.full(len(ids), -6.0, np.float32), advantages))
        return samples

    def _train(self, samples: list[Sample]) -> None:
        self.trainer.forward_backward(samples, clipped_policy_loss)
        self._step()

    def _step(self) -> None:
        """Takes an optimizer step. Parameters without a gradient, which an earlier step cleared, get one of zeros."""
        for parameter in self.trainer.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.trainer.optim_step(AdamConfig(lr=0.0))


def noise_config(policy: dict[str, Any], episodes: int, group: int, *, adapters: int = 1, **changes: Any) -> TextConfig:
    """Returns the config of a run in `NoiseEnv` with `adapters` seats and one adapter for each. `policy` are options of
    the adapters, `changes` other keys of the config."""
    env = {"type": f"{NoiseEnv.__module__}:{NoiseEnv.__qualname__}", "num_seats": adapters}
    tree = {
        "env": env | changes.pop("env", {}),
        "episodes": episodes,
        "policies": {f"agent{i}": {"type": "lora", "rank": RANK, **policy} for i in range(adapters)},
        "algorithm": {"type": "grpo", "group_size": group},
        "checkpoint_every": 1000,
    }
    return validate(TextConfig, tree | changes)
