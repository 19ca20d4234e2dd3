"""Several ranks make the same steps as one process, with less memory each, and write checkpoints for any number of
ranks."""

import numpy as np
import pytest
import torch
from helpers import ranks as program
from helpers.ranks import batch, kept_bytes, run_ranks, state, train, trainer

from palestra.core.losses import actor_critic_loss, clipped_policy_loss
from palestra.core.types import Sample
from palestra.engine.training import adapter_weights
from palestra.engine.training.checkpoints import load_training_state, save_training_state
from palestra.engine.training.micro_batch import micro_batches, split_over_ranks, token_weight
from palestra.parallel.process_group import SINGLE_PROCESS
from palestra.parallel.torch_group import join_process_group
from palestra.testing import tiny_lm


def alone(kind, steps, *, groups=5, tied=True, precision="auto"):
    learner = trainer(kind, "none", SINGLE_PROCESS, tied=tied, precision=precision)
    return state(learner, train(learner, range(steps), groups))


def assert_close(path, expected, atol=2e-5, rtol=1e-4, names=""):
    found = np.load(path)
    assert set(found) == set(expected)
    for name in found:
        if name.startswith(names):
            np.testing.assert_allclose(found[name], expected[name], atol=atol, rtol=rtol, err_msg=f"{path.stem} {name}")


def assert_steps(tmp_path, ranks, steps, cases, groups=5, work="steps"):
    run_ranks(ranks, work, tmp_path, steps, groups, *cases)
    for case in cases:
        kind, _, _, tied = case.split(",")
        assert_close(tmp_path / f"{case}.npz", alone(kind, steps, groups=groups, tied=tied == "tied"))


def test_single_process_group_without_torchrun():
    assert join_process_group() == SINGLE_PROCESS
    assert (
        SINGLE_PROCESS.all_gather("x") == ["x"]
        and SINGLE_PROCESS.broadcast("x") == "x"
        and not SINGLE_PROCESS.any_rank(False)
    )


def test_two_ranks_equal_one_process_with_whole_logits(tmp_path):
    assert_steps(tmp_path, 2, 2, ["lora,ddp,keep,tied", "full,fsdp,again,tied"], work="chunked")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_equals_one_process(tmp_path, ranks):
    cases = [
        f"{kind},{mode},{keep},{tied}"
        for kind in ("lora", "full")
        for mode in ("ddp", "fsdp")
        for keep, tied in (("keep", "tied"), ("again", "untied"))
    ]
    assert_steps(tmp_path, ranks, 5, cases)


@pytest.mark.slow
def test_ranks_without_samples_join_the_collectives(tmp_path):
    assert_steps(tmp_path, 4, 5, ["full,fsdp,keep,tied", "lora,fsdp,keep,tied", "lora,ddp,keep,tied"], groups=2)


@pytest.mark.slow
def test_checkpoints_resume_on_any_number_of_ranks(tmp_path):
    """A checkpoint of four loads on one, on two and on four, one of one on four: each continues as an uninterrupted
    run."""
    four = ["lora,ddp", "lora,fsdp", "full,ddp", "full,fsdp"]
    run_ranks(4, "save", tmp_path / "four", *four)
    one = {}
    for kind in ("lora", "full"):
        one[kind] = trainer(kind, "none", SINGLE_PROCESS)
        train(one[kind], range(3))
        save_training_state(tmp_path / "one" / f"{kind}-none", one[kind])
    whole = {kind: state(learner, train(learner, range(3, 5))) for kind, learner in one.items()}
    for case in four:
        kind, mode = case.split(",")
        learner = trainer(kind, "none", SINGLE_PROCESS)
        load_training_state(tmp_path / "four" / f"{kind}-{mode}", learner)
        np.savez(tmp_path / f"{case}.npz", **state(learner, train(learner, range(3, 5))))
        assert_close(tmp_path / f"{case}.npz", whole[kind])
    for count, source, cases in (
        (2, "four", ["lora,fsdp,ddp", "full,fsdp,ddp", "full,ddp,fsdp", "full,fsdp,fsdp"]),
        (4, "one", ["lora,fsdp,none", "full,fsdp,none", "full,ddp,none"]),
    ):
        run_ranks(count, "go_on", tmp_path / source, tmp_path, *cases)
        for case in cases:
            assert_close(tmp_path / f"{case}.npz", whole[case.split(",")[0]])


@pytest.mark.slow
def test_fsdp_on_four_ranks_keeps_a_quarter_per_rank():
    lines = dict(line.split() for line in run_ranks(4, "memory", "full", "lora").splitlines())
    whole = trainer("full", "none", SINGLE_PROCESS)
    train(whole, range(1))
    ratio = int(lines["full"]) / kept_bytes(whole)
    print(f"parameters and optimizer of a rank of 4: {ratio:.3f} of a single process's")
    assert 0.25 <= ratio <= 0.35
    adapted = trainer("lora", "none", SINGLE_PROCESS)
    train(adapted, range(1))
    assert int(lines["lora"]) < kept_bytes(adapted)  # the base is sharded, the adapter is not


@pytest.mark.slow
def test_half_precision_on_two_ranks_is_close_to_one_process(tmp_path):
    cases = [
        f"{kind},{mode},{p}" for kind in ("lora", "full") for mode in ("ddp", "fsdp") for p in ("bfloat16", "float16")
    ]
    run_ranks(2, "half", tmp_path, *cases)
    for case in cases:
        kind, _, precision = case.split(",")
        exact = alone(kind, 3)
        found = np.load(tmp_path / f"{case}.npz")
        assert np.abs(found["logps"] - exact["logps"]).max() < 0.15, case
        assert not np.array_equal(found["logps"], exact["logps"])  # computed in another order
        if precision == "float16":
            assert found["skipped 0"] == 0.0 and found["loss_scale 0"] == 2.0**10


# ---- one process


def test_split_over_ranks_is_even_and_keeps_groups_whole():
    samples = batch(0, groups=12)
    for count in (1, 2, 3, 4, 64):
        dealt = split_over_ranks(samples, count)
        assert len(dealt) == count and [id(s) for hand in dealt for s in hand] == [id(s) for s in samples]
        holders = [{i for i, hand in enumerate(dealt) for s in hand if s.group == g} for g in range(1, 12, 2)]
        assert all(len(who) == 1 for who in holders)
    sizes = [sum(len(s.prompt_ids) + len(s.token_ids) for s in hand) for hand in split_over_ranks(samples, 3)]
    assert max(sizes) < 2 * min(sizes)


def test_shares_over_ranks_equal_the_full_batch():
    samples = batch(1)
    share = token_weight(samples)
    dealt = [pack for hand in split_over_ranks(samples, 3) for pack in micro_batches(hand, 60, share)]
    whole = [s for pack in micro_batches(samples, 10**6) for s in pack.token_weights]
    assert np.concatenate([pack.token_weights for pack in dealt]).tolist() == whole
    assert sum(s * len(sample.token_ids) for s, sample in zip(whole, samples, strict=True)) == pytest.approx(1)


def gradients(kind, checkpointing):
    """A batch's gradients, and the bytes saved for the backward passes."""
    learner = trainer(kind, "none", SINGLE_PROCESS, checkpointing=checkpointing, num_hidden_layers=6)
    learner.pack_tokens = 10**6
    kept = 0

    def note(tensor):
        nonlocal kept
        kept += tensor.numel() * tensor.element_size() if not tensor.is_leaf else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        learner.forward_backward(batch(0), actor_critic_loss, entropy=0.01)
    return [p.grad for p in learner.parameters], kept


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_activation_checkpointing_keeps_gradients_and_saves_memory(kind):
    (plain, much), (again, little) = gradients(kind, False), gradients(kind, True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    print(f"{kind}: kept for backward {little / much:.2f} of what it was")
    assert little < 0.5 * much


def test_overflowing_step_is_skipped_and_counted():
    learner = trainer("lora", "none", SINGLE_PROCESS, precision="float16")
    before = [p.detach().clone() for p in learner.parameters]
    learner.loss_scale.value = 2.0**60
    learner.forward_backward(batch(0), clipped_policy_loss)
    figures = learner.optim_step(program.ADAM)
    assert figures == {"grad_norm": 0.0, "critic_grad_norm": 0.0, "loss_scale": 2.0**60, "skipped": 1.0}
    assert all(torch.equal(p, b) for p, b in zip(learner.parameters, before, strict=True))
    assert learner.loss_scale.value == 2.0**59 and learner.steps == 0
    learner.loss_scale.value = 2.0**10
    learner.forward_backward(batch(0), clipped_policy_loss)
    assert learner.optim_step(program.ADAM)["skipped"] == 0.0 and learner.steps == 1


def test_loss_scale_grows_after_good_steps_and_is_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_weights, "GROWTH_INTERVAL", 2)
    learner = trainer("lora", "none", SINGLE_PROCESS, precision="float16")
    learner.loss_scale.value = 2.0**8
    train(learner, range(3))
    assert (learner.loss_scale.value, learner.loss_scale.good_steps) == (2.0**9, 1)
    save_training_state(tmp_path, learner)
    other = trainer("lora", "none", SINGLE_PROCESS, precision="float16")
    load_training_state(tmp_path, other)
    assert (other.loss_scale.value, other.loss_scale.good_steps) == (2.0**9, 1)


def test_rollouts_use_a_cast_copy_of_the_weights():
    engine = tiny_lm(0)
    engine.autocast_dtype = torch.bfloat16
    weight = engine.model.get_input_embeddings().weight
    kept = weight.data_ptr()
    with engine.rollout_context():
        assert weight.dtype == torch.bfloat16
    assert weight.dtype == torch.float32 and weight.data_ptr() == kept


def test_empty_batch_gives_no_outputs():
    learner = trainer("lora", "none", SINGLE_PROCESS)
    none: list[Sample] = []
    assert learner.logprobs(none) == [] and learner.forward_backward(none, clipped_policy_loss) == {}
