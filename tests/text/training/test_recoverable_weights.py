"""Hosted weights whose process is lost again and again equal those of an undisturbed run."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.core.losses import clipped_policy_loss
from palestra.core.types import Sample
from palestra.engine.training.adapter_weights import OptimConfig
from palestra.parallel.file_bundle import content_hash, num_bytes, pack_folder
from palestra.parallel.processes import ProcessLost
from palestra.text.build.distributed import LearnerSpecs, open_weight_host
from palestra.text.learners.lm import Weights
from palestra.text.learners.lm_config import LoraPolicyConfig
from palestra.text.training.recoverable_weights import (
    HostedWeights,
    RecoverableWeights,
    WeightHost,
    WeightsCall,
    trainer_traffic,
)

ADAM = OptimConfig(lr=1e-2)


class UnreliableHost:
    """A weight host in this process that is lost at the calls of these numbers: before the call runs, or (`late`)
    before its result is returned."""

    def __init__(self, make: Callable[[], WeightHost], lost: set[int], late: bool = False) -> None:
        self.make, self.lost, self.late = make, lost, late
        self.calls = self.starts = 0

    def start(self) -> None:
        self.starts += 1
        self.shop: WeightHost | None = self.make()

    def call(self, verb: str, *arguments: Any) -> Any:
        self.calls += 1
        if self.shop is None or (self.calls in self.lost and not self.late):
            self.shop = None
            raise ProcessLost("out of memory")
        found = getattr(self.shop, verb)(*arguments)
        if self.calls in self.lost:
            self.shop = None
            raise ProcessLost("out of memory")
        return found

    def close(self) -> None:
        self.shop = None


def samples(seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            rng.integers(10, 50, 5).astype(np.int32),
            rng.integers(10, 50, 3).astype(np.int32),
            rng.normal(-3, 1, 3).astype(np.float32),
            rng.normal(0, 1, 3).astype(np.float32),
            returns=rng.normal(0, 1, 3).astype(np.float32),
        )
        for _ in range(4)
    ]


def train_step(weights: Any, step: int) -> list[Any]:
    """One optimizer step from two gradients, with a query between them; step 2 starts a new stage."""
    if step == 2:
        weights.start_stage()
    return [
        weights.forward_backward(samples(step), clipped_policy_loss, clip=0.2),
        [row.tolist() for row in weights.logprobs(samples(7), reference=True)],
        weights.forward_backward(samples(step + 10), clipped_policy_loss, clip=0.2),
        weights.optim_step(ADAM),
    ]


def specs(base: Path) -> LearnerSpecs:
    config = LoraPolicyConfig(base=str(base), rank=4)
    return {
        "guide": {"config": config, "seed": 1},
        "walker": {"config": config, "seed": 2, "critic": "shared"},
        "herald": {"config": config, "seed": 3, "critic": "separate"},
    }


@pytest.fixture(scope="module")
def undisturbed(base: Path) -> tuple[dict[str, list[Any]], dict[str, dict[str, bytes]]]:
    """The results of four steps of each trainer without losses, and the files of its final weights."""
    weights: dict[str, Weights] = dict(open_weight_host("cpu", 8, specs(base)).weights)
    results = {name: [train_step(own, step) for step in range(4)] for name, own in weights.items()}
    return results, {name: saved_files(own) for name, own in weights.items()}


def saved_files(weights: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        weights.save(Path(folder))
        return {name: data.tobytes() for name, data in pack_folder(Path(folder)).items()}


SLOW_CASES = [pytest.param(1, True, marks=pytest.mark.slow), pytest.param(3, False, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("copy_every", "late"), [(1, False), (3, True), *SLOW_CASES])
@pytest.mark.few(1)
def test_recovery_from_a_kill_at_any_call_is_bit_identical(
    base: Path, undisturbed: Any, copy_every: int, late: bool
) -> None:
    """Trainer processes are killed at random calls, also during recovery."""
    holder = UnreliableHost(partial(open_weight_host, "cpu", 8, specs(base)), set(range(2, 400, 29)), late)
    bench = RecoverableWeights(lambda: holder, copy_every)
    hosted = {name: HostedWeights(bench, name) for name in specs(base)}
    results: dict[str, list[Any]] = {name: [] for name in hosted}
    for step in range(4):
        for name, weights in hosted.items():
            results[name].append(train_step(weights, step))
    assert (results, {name: saved_files(weights) for name, weights in hosted.items()}) == undisturbed
    assert "critic/critic.safetensors" in undisturbed[1]["herald"]
    assert bench.num_losses >= 2 and holder.starts == bench.num_losses + 1


def test_recovery_starts_from_the_last_checkpoint(base: Path, undisturbed: Any, tmp_path: Path) -> None:
    holder = UnreliableHost(partial(open_weight_host, "cpu", 8, specs(base)), set())
    weights = HostedWeights(RecoverableWeights(lambda: holder), "guide")
    train_step(weights, 0)
    weights.save(tmp_path)
    train_step(weights, 1)
    weights.load(tmp_path)
    holder.shop = None
    assert [train_step(weights, step) for step in (1, 2, 3)] == undisturbed[0]["guide"][1:]
    assert saved_files(weights) == undisturbed[1]["guide"]


def test_recovery_repeats_what_followed_a_checkpoint(base: Path, undisturbed: Any, tmp_path: Path) -> None:
    """The files of a checkpoint are the copy that a new process starts from."""
    holder = UnreliableHost(partial(open_weight_host, "cpu", 8, specs(base)), set())
    bench = RecoverableWeights(lambda: holder)
    weights = HostedWeights(bench, "guide")
    results = [train_step(weights, 0)]
    weights.save(tmp_path)
    results += [train_step(weights, 1)]
    holder.shop, calls = None, holder.calls
    assert weights.logprobs(samples(7))
    assert holder.calls - calls == 6  # the lost call; the load, two gradients and a step; the call again
    assert [*results, *(train_step(weights, step) for step in (2, 3))] == undisturbed[0]["guide"]
    assert saved_files(weights) == undisturbed[1]["guide"]


@pytest.mark.parametrize("copy_every", [1, 16])
def test_files_that_are_known_are_not_sent_again(base: Path, copy_every: int, tmp_path: Path) -> None:
    """The copy made after a step contains the adapter, which is then published from it; if no copy is due, the adapter
    alone is sent."""
    host = open_weight_host("cpu", 8, specs(base))
    weights = HostedWeights(RecoverableWeights(lambda: UnreliableHost(lambda: host, set()), copy_every), "guide")
    state, adapter = 0, 0
    for step in (0, 1, 3):
        before = trainer_traffic.copy()
        train_step(weights, step)
        weights.export(tmp_path / f"{step}")
        host.weights["guide"].export(tmp_path / "here" / f"{step}")
        files = pack_folder(tmp_path / f"{step}")
        assert content_hash(files) == content_hash(pack_folder(tmp_path / "here" / f"{step}"))
        adapter, state = num_bytes(files), sum(map(len, saved_files(host.weights["guide"]).values()))
        sent = trainer_traffic["returned_bytes"] - before["returned_bytes"]
        settings = (tmp_path / f"{step}" / "adapter_config.json").stat().st_size if step else 0  # they do not change
        assert sent == (state if copy_every == 1 else adapter) - settings
    assert state > 2.9 * adapter
    before = trainer_traffic.copy()
    weights.export(tmp_path / "again")
    assert trainer_traffic - before == {"known_bytes": adapter}
    assert content_hash(pack_folder(tmp_path / "again")) == content_hash(files)


def test_call_that_kills_every_process_is_given_up(base: Path) -> None:
    holder = UnreliableHost(partial(open_weight_host, "cpu", 8, specs(base)), set(range(1, 99)))
    with pytest.raises(ValueError, match="3 processes in a row that train guide died, the last one: out of memory"):
        HostedWeights(RecoverableWeights(lambda: holder), "guide").forward_backward(samples(0), clipped_policy_loss)


def test_errors_of_the_trainer_process_are_raised_in_the_caller(base: Path) -> None:
    bench = RecoverableWeights(lambda: UnreliableHost(partial(open_weight_host, "cpu", 8, specs(base)), set()))
    with pytest.raises(ValueError, match="this policy has no critic"):
        HostedWeights(bench, "guide").values(samples(0))
    with pytest.raises(ValueError, match="are in another process"):
        HostedWeights(bench, "guide").snapshot("guide@0")
    assert bench.num_losses == 0 and bench.call("walker", WeightsCall("values", (samples(0),)))
