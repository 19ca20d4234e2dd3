"""Random log-probabilities for losses of palestra and of another package, and the comparison of both.

The other package runs in its own virtual environment, in a script that reads a list of cases as JSON and prints a list
of results. The result of a loss has its value, `loss`, and its gradient with respect to `logp` [B, T], `slopes`.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from palestra.core.losses import LossInputs
from palestra.core.types import Sample
from palestra.engine.training.micro_batch import build_loss_inputs, micro_batches, token_weight

HERE = Path(__file__).parent
BENCH = HERE.parent.parent / "bench"
TRL = BENCH / ".venv-trl" / "bin" / "python"
VERL = BENCH / ".venv-verl" / "bin" / "python"
LENGTHS = [3, 7, 1, 5, 6, 2]
LONGEST = 9  # tokens of an answer, for Dr. GRPO


def draw(seed: int, lengths: Sequence[int]) -> dict[str, np.ndarray]:
    """Log-probabilities [B, T] of the policy in training, of the sampler and of the reference, far enough apart to
    exceed every bound, and advantages [B]."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    logp = -rng.exponential(1.5, shape)
    return {
        "logp": logp,
        "old": logp + rng.normal(0, 0.4, shape),
        "ref": logp + rng.normal(0, 0.4, shape),
        "advantages": rng.normal(0, 1, shape[0]),
        "mask": (np.arange(shape[1]) < np.array(lengths)[:, None]).astype(np.int64),
    }


def run_cases(python: Path, script: str, cases: dict[str, dict]) -> dict[str, dict]:
    """The other package's results of all cases, from one process."""
    plain = json.dumps(list(cases.values()), default=np.ndarray.tolist)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, HERE / script], input=plain, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


def scored(case: dict, advantages: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> LossInputs:
    """The case's tokens in one row, without padding; `weights` and `groups` have one value per sequence."""
    mask = case["mask"] == 1
    lengths = mask.sum(1)

    def spread(values: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.repeat(values, lengths))

    logp, old, ref = (torch.tensor(case[name][mask]) for name in ("logp", "old", "ref"))
    return LossInputs(
        logp.requires_grad_(),
        torch.zeros(len(logp)),
        old,
        ref,
        spread(advantages),
        spread(weights),
        spread(np.arange(len(mask))),
        spread(groups),
    )


def shares(lengths: np.ndarray, weights: np.ndarray, denominator: float | None = None) -> np.ndarray:
    """The weight of each token of each sequence, as the trainer computes it for samples of these weights."""
    none = np.zeros(0)
    samples = [
        Sample(none, np.zeros(n), none, none, weight=float(w), denominator=denominator)
        for n, w in zip(lengths, weights, strict=True)
    ]
    (pack,) = micro_batches(samples, 10_000)
    return np.array(pack.token_weights)


def trained_tokens(samples: Sequence[Sample], logp: Sequence[np.ndarray]) -> LossInputs:
    """The loss inputs of the samples that get a pass; `logp` has the log-probabilities [T] of each sample."""
    trained = [(sample, own) for sample, own in zip(samples, logp, strict=True) if sample.has_gradient]
    (pack,) = micro_batches([sample for sample, _ in trained], 10_000, token_weight(samples))
    logp_M = torch.tensor(np.concatenate([own for _, own in trained])).requires_grad_()
    return build_loss_inputs(pack, logp_M, torch.zeros(len(logp_M)))


def assert_equal_loss(tokens: LossInputs, value: torch.Tensor, theirs: dict, mask: np.ndarray) -> None:
    (slopes,) = torch.autograd.grad(value, tokens.logp_M)
    assert value.item() == pytest.approx(theirs["loss"], abs=1e-5)
    np.testing.assert_allclose(slopes.numpy(), np.array(theirs["slopes"])[mask == 1], atol=1e-5)
    assert np.abs(slopes.numpy()).max() > 1e-3
