"""The value head: its inputs, independence of packing, gradients, and checkpoints."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.tolerances import GRADIENTS, LOGPROB_ATOL
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from palestra.core.losses import actor_critic_loss, clipped_policy_loss
from palestra.core.optimizers import AdamW
from palestra.core.types import Sample
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.training.adapter_weights import AdapterWeights, OptimConfig
from palestra.engine.training.checkpoints import load_training_state, save_training_state
from palestra.testing import tiny_lm

VALUE_ONLY = {"value_coef": 1.0}


def trainer_on(*, full=False, critic=True, seed=0, taught=True, engine=None, **options):
    """A trainer whose adapter and head, if `taught`, are not zero."""
    engine = engine or tiny_lm(4, initializer_range=0.2)
    adapter = None if full else Adapter(engine.linear_layers, LoraConfig(rank=4), seed=seed)
    trainer = AdapterWeights(engine, adapter, critic=critic, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in [b for _, b in adapter.weights.values()] if adapter and taught else []:
            weight.normal_(0, 0.1, generator=generator)
        for weight in trainer.critic.parameters() if critic and taught else []:
            weight.normal_(0, 0.1, generator=generator)
    return trainer


def sample(prompt, ids, seed=0, **more):
    rng = np.random.default_rng(seed)
    logprobs, advantages, values, returns = (rng.normal(size=len(ids)).astype(np.float32) for _ in range(4))
    kept = {"values": values, "returns": returns} | more
    return Sample(np.array(prompt, np.int32), np.array(ids, np.int32), logprobs - 5, advantages, **kept)


def sample_conversation(n=3, seed=0):
    """Several answers to one prompt, and a conversation whose later prompts contain the earlier turns, so that prefixes
    are shared. Answers have 1 to 5 tokens."""
    rng = np.random.default_rng(seed)
    prompt, samples = rng.integers(5, 250, 7).tolist(), []
    for i in range(n):
        samples.append(sample(prompt, rng.integers(5, 250, 1 + i), seed + i))
    for i in range(n):
        said = rng.integers(5, 250, 5 - i).tolist()
        samples.append(sample(prompt, said, seed + n + i, temperature=0.5 + i))
        prompt = [*prompt, *said, *rng.integers(5, 250, 2).tolist()]
    return samples


# ---- the optimizer step


def test_value_head_gradient_is_clipped_separately():
    """Returns of 100 give the head a gradient far beyond the clip. The policy gets no gradient of the value loss (a
    head of zeros passes none on to the features), and is clipped by its own norm, as without a critic."""
    far = [replace(one, returns=one.returns + 100) for one in sample_conversation()]
    moments = {}
    for critic, loss in ((True, actor_critic_loss), (False, clipped_policy_loss)):
        trainer = trainer_on(critic=critic, taught=False)
        trainer.forward_backward(far, loss)
        metrics = trainer.optim_step(OptimConfig(max_grad_norm=1e-3, critic_max_grad_norm=0.5))
        moments[critic] = [trainer.optimizer.state[p]["exp_avg"] for p in trainer.policy_parameters]
        if critic:
            assert metrics["critic_grad_norm"] > 10 and metrics["grad_norm"] < 10
            head = [trainer.optimizer.state[p]["exp_avg"] for p in trainer.critic_parameters]
            assert float(torch.nn.utils.get_total_norm(head)) == pytest.approx((1 - 0.9) * 0.5, rel=1e-3)
    for one, other in zip(*moments.values(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("critic_lr", "expected"), [(None, 5e-4), (0.01, 0.01), (0.0, 0.0)])
def test_value_head_has_its_own_learning_rate(critic_lr, expected):
    """Adam's first step moves each weight by its learning rate."""
    trainer = trainer_on()
    before = [p.detach().clone() for p in trainer.parameters]
    trainer.forward_backward(sample_conversation(), actor_critic_loss)
    trainer.optim_step(OptimConfig(lr=5e-4, critic_lr=critic_lr))
    moved = [float((p.detach() - old).abs().max()) for p, old in zip(trainer.parameters, before, strict=True)]
    assert moved[-2:] == pytest.approx([expected] * 2, rel=1e-2)
    assert max(moved[:-2]) == pytest.approx(5e-4, rel=1e-2)


# ---- values


def test_new_critic_outputs_zero():
    values = trainer_on(taught=False).values(sample_conversation())
    assert [len(v) for v in values] == [1, 2, 3, 5, 4, 3] and not any(v.any() for v in values)


def test_values_use_the_features_before_the_token(base):
    """The features are those of `transformers` after the last layer, at the token before; the token itself does not
    matter."""
    engine = Engine.load(str(base), device="cpu")
    trainer = trainer_on(engine=engine)
    for _, b in trainer.adapter.weights.values():
        b.data.zero_()  # the base itself, which is another model
    plain = AutoModelForCausalLM.from_pretrained(base)
    for one in sample_conversation():
        ids = torch.tensor(np.concatenate([one.prompt_ids, one.token_ids]).astype(np.int64))
        with torch.no_grad():
            features = plain(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]
            expected = trainer.critic(features)[len(one.prompt_ids) - 1 : -1, 0].numpy()
        np.testing.assert_allclose(trainer.values([one])[0], expected, atol=1e-4)
        other = replace(one, token_ids=np.array([*one.token_ids[:-1], 3], np.int32))
        np.testing.assert_allclose(trainer.values([other])[0], expected, atol=1e-4)


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
def test_values_do_not_depend_on_how_samples_are_packed(full):
    samples = sample_conversation()
    together = trainer_on(full=full).values(samples)
    assert np.concatenate(together).std() > 0.1  # otherwise the test would prove nothing
    for pack_tokens in (1, 25, 60):
        parted = trainer_on(full=full, pack_tokens=pack_tokens).values(samples)
        for one, other in zip(together, parted, strict=True):
            np.testing.assert_allclose(one, other, atol=LOGPROB_ATOL)
    for one, alone in zip(together, samples, strict=True):
        np.testing.assert_allclose(one, trainer_on(full=full).values([alone])[0], atol=LOGPROB_ATOL)


def test_values_do_not_depend_on_temperature():
    (one,) = trainer_on().values([sample([7, 8], [9, 10])])
    (hot,) = trainer_on().values([sample([7, 8], [9, 10], temperature=3.0)])
    np.testing.assert_array_equal(one, hot)


@pytest.mark.parametrize("pack_tokens", [1, 40, 10**6])
def test_loss_receives_current_and_old_values(pack_tokens):
    trainer, samples, seen = trainer_on(pack_tokens=pack_tokens), sample_conversation(), []

    def look(tokens, **_):
        seen.append(tokens)
        return actor_critic_loss(tokens)

    trainer.forward_backward(samples, look)
    for field, expected in (
        ("value_M", trainer.values(samples)),
        ("old_value_M", [s.values for s in samples]),
        ("return_M", [s.returns for s in samples]),
    ):
        joined = torch.cat([getattr(tokens, field).detach() for tokens in seen]).numpy()
        np.testing.assert_allclose(joined, np.concatenate(expected), atol=LOGPROB_ATOL)


def test_values_without_critic_are_refused():
    trainer = trainer_on(critic=False)
    with pytest.raises(ValueError, match="no critic"):
        trainer.values(sample_conversation())
    with pytest.raises(ValueError, match="without a critic"):
        trainer.forward_backward(sample_conversation(), actor_critic_loss)


# ---- gradients of the value loss


def value_gradients(trainer, samples):
    """The gradients of the value loss alone."""
    still = [replace(s, advantages=np.zeros_like(s.advantages)) for s in samples]
    trainer.forward_backward(still, actor_critic_loss, **VALUE_ONLY)
    return {"head": [p.grad for p in trainer.critic.parameters()], "all": [p.grad for p in trainer.parameters]}


def test_value_gradient_reaches_head_and_adapter():
    trainer = trainer_on()
    grads = value_gradients(trainer, sample_conversation())
    assert all(grad.abs().max() > 1e-6 for grad in grads["all"])
    assert len(grads["all"]) == 2 * len(trainer.adapter.weights) + 2
    assert not any(w.grad is not None for w in trainer.engine.model.parameters())  # the base has none


def test_zero_value_head_gives_features_no_gradient():
    """A head of zeros has the value 0 for any features."""
    trainer = trainer_on(taught=False)
    grads = value_gradients(trainer, sample_conversation())
    assert all(grad.any() for grad in grads["head"])
    assert not any(grad is not None and grad.any() for grad in grads["all"][:-2])


def test_value_head_gradient_by_hand():
    """One token, value 0, return 2: the derivative of (v - 2)^2 / 2 is -2; for the weights it is multiplied by the
    features."""
    trainer, seen = trainer_on(taught=False), []
    one = sample([7, 8], [9], values=np.zeros(1, np.float32), returns=np.array([2.0], np.float32))
    trainer.critic.register_forward_hook(lambda head, inputs, output: seen.append(inputs[0].detach()))
    weight, bias = value_gradients(trainer, [one])["head"]
    assert bias.item() == -2.0
    torch.testing.assert_close(weight, -2.0 * seen[0])


def test_gradients_do_not_depend_on_how_samples_are_packed():
    whole, *others = (value_gradients(trainer_on(pack_tokens=n), sample_conversation())["all"] for n in (10**6, 1, 40))
    for other in others:
        for a, b in zip(whole, other, strict=True):
            torch.testing.assert_close(a, b, **GRADIENTS)


def test_critic_learns_state_values(check_score):
    """Returns of 1 after one prompt and of -1 after another, in few steps of the head and the adapter together."""
    trainer = trainer_on(taught=False)
    samples = [
        sample(prompt, [20 + i, 30 + i], returns=np.full(2, worth, np.float32), values=np.zeros(2, np.float32))
        for prompt, worth in (([7, 8, 9], 1.0), ([11, 12, 13], -1.0))
        for i in range(4)
    ]
    losses = []
    for _ in range(40):
        still = [replace(s, advantages=np.zeros(2, np.float32)) for s in samples]
        losses.append(trainer.forward_backward(still, actor_critic_loss, **VALUE_ONLY)["value_loss"])
        trainer.optim_step(OptimConfig(lr=1e-2))
    assert losses[0] == pytest.approx(0.5)
    check_score(losses[-1], "loss")
    worths = [v.mean() for v in trainer.values(samples)]
    check_score(min(*worths[:4], *(-worth for worth in worths[4:])))


# ---- checkpoints


def train(trainer, steps, first=0):
    figures = []
    for step in range(first, first + steps):
        metrics = trainer.forward_backward(
            sample_conversation(seed=step), actor_critic_loss, value_clip=0.2, entropy=0.01
        )
        figures.append(metrics | trainer.optim_step(OptimConfig(lr=1e-2, optimizer=AdamW(weight_decay=0.1))))
    return figures


def state(trainer):
    slots = sorted(trainer.optimizer.state_dict()["state"].items())
    optimizer = [value for _, named in slots for _, value in sorted(named.items())]
    reference = trainer.reference.parameters() if trainer.reference else []
    return [*trainer.parameters, *reference, *optimizer, torch.tensor(trainer.steps)]


def assert_equal_states(one, other):
    pairs = zip(state(one), state(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
def test_trainer_with_critic_resume_is_bit_identical(tmp_path, full):
    whole = trainer_on(full=full)
    train(whole, 2)
    if not full:
        whole.set_reference()
    train(whole, 2, first=2)
    save_training_state(tmp_path / "t", whole)
    resumed = trainer_on(full=full, seed=9)  # another start, which loading must replace
    load_training_state(tmp_path / "t", resumed)
    assert assert_equal_states(whole, resumed) and resumed.steps == 4
    for ask in (
        lambda t: t.values(sample_conversation()),
        lambda t: [] if full else t.logprobs(sample_conversation(), reference=True),
    ):
        assert [a.tolist() for a in ask(whole)] == [a.tolist() for a in ask(resumed)]
    assert train(whole, 3, first=4) == train(resumed, 3, first=4)
    assert assert_equal_states(whole, resumed)
    saved = load_file(tmp_path / "t" / "critic.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {"weight": (1, 64), "bias": (1,)}


def test_resume_of_an_untrained_critic_is_bit_identical(tmp_path):
    """As after a first stage without a critic: the optimizer has only the adapter's parameters."""
    whole = trainer_on(taught=False)
    whole.forward_backward(sample_conversation(), clipped_policy_loss)
    whole.optim_step(OptimConfig())
    save_training_state(tmp_path / "t", whole)
    resumed = trainer_on(seed=9)
    load_training_state(tmp_path / "t", resumed)
    assert (
        assert_equal_states(whole, resumed)
        and train(whole, 2) == train(resumed, 2)
        and assert_equal_states(whole, resumed)
    )


def test_reference_is_the_weights_at_the_anchor(tmp_path):
    trainer, samples = trainer_on(), sample_conversation()
    bare = trainer.logprobs(samples, reference=True)
    trainer.set_reference()
    then = trainer.logprobs(samples)
    train(trainer, 2)
    for logprobs, expected in zip(trainer.logprobs(samples, reference=True), then, strict=True):
        np.testing.assert_array_equal(logprobs, expected)
    assert np.abs(np.concatenate(bare) - np.concatenate(then)).max() > 0.01
    assert np.abs(np.concatenate(trainer.logprobs(samples)) - np.concatenate(then)).max() > 0.01


def test_checkpoint_before_the_anchor_has_the_base_as_reference(tmp_path):
    trainer, samples = trainer_on(), sample_conversation()
    save_training_state(tmp_path / "t", trainer)
    bare = trainer.logprobs(samples, reference=True)
    trainer.set_reference()
    load_training_state(tmp_path / "t", trainer)
    assert trainer.reference is None
    for logprobs, expected in zip(trainer.logprobs(samples, reference=True), bare, strict=True):
        np.testing.assert_array_equal(logprobs, expected)


def test_checkpoint_without_critic_is_refused(tmp_path):
    save_training_state(tmp_path / "t", trainer_on(critic=False))
    with pytest.raises(ValueError, match=r"no critic \(critic\.safetensors\): it was trained without one"):
        load_training_state(tmp_path / "t", trainer_on())


def test_adapter_saved_with_a_critic_loads_in_peft(tmp_path):
    """PEFT's files have no weight of the head, and the targets do not name it."""
    trainer = trainer_on()
    save_training_state(tmp_path / "t", trainer)
    tensors = load_file(tmp_path / "t" / "adapter_model.safetensors")
    assert len(tensors) == 2 * len(trainer.adapter.weights) and all("lora_" in name for name in tensors)
    config = json.loads((tmp_path / "t" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(trainer.adapter.weights)
