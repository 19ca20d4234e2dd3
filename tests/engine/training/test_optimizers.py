"""Optimizers against their definitions, resumed bit for bit, with the memory that the plan counts."""

import importlib.util

import numpy as np
import pytest
import torch

from palestra.core.config import validate
from palestra.core.losses import cross_entropy_loss
from palestra.core.optimizers import AdamW, Muon
from palestra.core.types import Sample
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.checkpoints import load_training_state, save_training_state
from palestra.engine.training.optimizers import MuonAndAdamW, build_optimizer, state_bytes
from palestra.testing import tiny_lm

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
EIGHT_BITS = pytest.param(
    "adamw_8bit",
    marks=[pytest.mark.peers, pytest.mark.skipif(not HAS_BITSANDBYTES, reason="make test-bitsandbytes installs it")],
)
KINDS = ["adamw", "muon", EIGHT_BITS]
OTHERS = ["sgd", "helpers.own_things:SignDescent"]
IDS = np.random.default_rng(0).integers(5, 250, 24).astype(np.int32)
SAMPLE = Sample(IDS[:4], IDS[4:], np.zeros(20, np.float32), np.ones(20, np.float32))


def config(kind):
    """Returns the config of an optimizer with its defaults."""
    return validate(OptimConfig, {"optimizer": {"type": kind}}).optimizer


def trainer(kind, *, full=False, critic=False):
    """A trainer of an adapter whose larger matrices have moments of 8 bits, or of a full model."""
    engine = tiny_lm()
    adapter = None if full else Adapter(engine.linear_layers, LoraConfig(rank=64, use_dora=True), seed=0)
    return AdapterWeights(engine, adapter, optimizer=config(kind), critic=critic)


def train(trainer, steps, lr=1e-3):
    losses = []
    for _ in range(steps):
        losses.append(trainer.forward_backward([SAMPLE], cross_entropy_loss)["loss"])
        trainer.optim_step(OptimConfig(lr=lr, optimizer=AdamW(weight_decay=0.01)))
    return losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.few(2)
def test_training_lowers_the_loss(kind, full, check_score):
    losses = train(trainer(kind, full=full), 12, lr=5e-3)
    check_score(losses[0] - losses[-1])


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.few(4)
def test_resumed_trainer_is_bit_identical(tmp_path, kind, full):
    whole, first, second = (trainer(kind, full=full) for _ in range(3))
    train(whole, 5)
    train(first, 3)
    save_training_state(tmp_path, first)
    load_training_state(tmp_path, second)
    assert train(second, 2)
    assert second.steps == 5
    assert all(torch.equal(x, y) for x, y in zip(whole.parameters, second.parameters, strict=True))


def test_muon_trains_matrices_and_adamw_the_rest():
    """The update of a matrix has Muon's size: 0.2 * sqrt(larger side) / sqrt(number of values) times its rank's root,
    which is the learning rate times 0.2 for each value of an orthogonal update (Liu et al., 2025, eq. 4)."""
    matrix, vector = torch.randn(32, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    optimizer = build_optimizer(Muon(), [matrix, vector], [], [matrix])
    before = [matrix.detach().clone(), vector.detach().clone()]
    matrix.grad, vector.grad = torch.randn(32, 64), torch.randn(64)
    for group in optimizer.param_groups:
        group.update(lr=0.01, weight_decay=0.0)
    optimizer.step()
    update = (before[0] - matrix.detach()) / (0.01 * 0.2 * 64**0.5)
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.6 and singular.max() < 1.3  # Newton-Schulz leaves singular values in this range
    torch.testing.assert_close(before[1] - vector.detach(), 0.01 * vector.grad.sign(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("full", [False, True])
def test_muons_matrices_are_those_of_the_adapter_or_of_the_layers(full):
    mine = trainer("muon", full=full)
    train(mine, 1)
    assert isinstance(mine.optimizer, MuonAndAdamW)
    slots = {id(p): set(state) for p, state in mine.optimizer.state.items()}
    if full:
        named = dict(mine.engine.model.named_parameters())
        assert slots[id(named["model.layers.0.mlp.up_proj.weight"])] == {"momentum_buffer"}
        apart = [named["model.embed_tokens.weight"], named["model.norm.weight"]]
    else:
        assert all(slots[id(w)] == {"momentum_buffer"} for pair in mine.adapter.weights.values() for w in pair)
        apart = list(mine.adapter.extras.magnitudes.values())
    assert all("exp_avg" in slots[id(w)] for w in apart)


def test_a_critic_has_its_own_learning_rate_under_muon():
    mine = trainer("muon", critic=True)
    mine.forward_backward([SAMPLE], cross_entropy_loss)
    mine.optim_step(OptimConfig(lr=1e-3, critic_lr=5e-2))
    rates = {bool(group["critic"]): group["lr"] for group in mine.optimizer.param_groups}
    assert rates == {False: 1e-3, True: 5e-2}


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_the_bytes_of_the_state(kind):
    """Of large matrices; those below 4,096 values and tables of 8 bits are left out."""
    weights = [torch.randn(256, 512, requires_grad=True) for _ in range(3)]
    optimizer = build_optimizer(config(kind), weights, [], weights)
    for weight in weights:
        weight.grad = torch.randn(256, 512)
    optimizer.step()
    slots = [t for p in weights for t in optimizer.state[p].values() if torch.is_tensor(t)]
    held = sum(t.numel() * t.element_size() for t in slots)
    assert held == pytest.approx(state_bytes(config(kind), 3 * 256 * 512), rel=0.02)


def test_another_optimizers_state_is_refused(tmp_path):
    mine = trainer("adamw")
    train(mine, 1)
    save_training_state(tmp_path, mine)
    with pytest.raises(ValueError, match="holds the state of optimizer: adamw, and the config has muon"):
        load_training_state(tmp_path, trainer("muon"))


@pytest.mark.skipif(HAS_BITSANDBYTES, reason="the package is there")
def test_a_missing_package_is_named():
    with pytest.raises(ValueError, match=r"pip install 'palestra\[bitsandbytes\]', or set optimizer: {type: adamw}"):
        trainer("adamw_8bit")
