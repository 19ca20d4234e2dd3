"""Training requests: inputs of each loss and their shapes; other requests are refused by name."""

from typing import Any

import numpy as np
import pytest

from palestra.core.types import Datum
from palestra.service.wire.schemas.wire_model import BadRequest
from palestra.service.wire.validation import LOSS_SPECS, check_train_call

POLICY_LOSSES = [loss for loss in LOSS_SPECS if loss != "cross_entropy"]
RATIO: dict[str, Any] = {"logprobs": [-1, -2, -3], "advantages": [1, 1, -1]}


def datum(tokens: Any = (1, 2, 3), targets: Any = (2, 3, 4), **inputs: Any) -> Datum:
    arrays = {name: np.array(values, np.float32) for name, values in inputs.items()}
    return Datum(np.array(tokens, np.int64), np.array(targets, np.int64), arrays)


def check(
    *data: Datum, loss: str = "cross_entropy", options: dict[str, Any] | None = None, **limits: int
) -> list[Datum]:
    return check_train_call(
        data, loss, options or {}, **{"vocab_size": 10, "max_length": 8, "max_tokens": 20, **limits}
    )


def refused(message: str, *data: Datum, **more: Any) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        check(*data, **more)
    assert len(str(caught.value)) < 400


def test_supervised_datum_is_unchanged() -> None:
    (found,) = check(datum(weights=[0.5, -2, 0]))
    assert found.tokens.tolist() == [1, 2, 3] and found.targets.tolist() == [2, 3, 4]
    assert {name: array.tolist() for name, array in found.inputs.items()} == {"weights": [0.5, -2, 0]}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_policy_datum_gets_unit_weights(loss: str) -> None:
    (found,) = check(datum(**RATIO, something_else=[NAN, 1]), loss=loss)
    assert {name: array.tolist() for name, array in found.inputs.items()} == {**RATIO, "weights": [1, 1, 1]}


NAN = float("nan")


def test_masks_are_multiplied() -> None:
    (found,) = check(datum(weights=[2, 3, 4], mask=[1, 0, 1], loss_mask=[1, 1, 0.5]))
    assert {name: array.tolist() for name, array in found.inputs.items()} == {"weights": [2, 0, 2]}
    (found,) = check(datum(**RATIO, mask=[1, 0, 1]), loss="ppo")
    assert found.inputs.keys() == {"logprobs", "advantages", "weights"}
    assert found.inputs["weights"].tolist() == [1, 0, 1]


def test_loss_mask_alone_becomes_cross_entropy_weights() -> None:
    assert check(datum(loss_mask=[0, 1, 1]))[0].inputs["weights"].tolist() == [0, 1, 1]


def test_scalar_advantage_is_broadcast_to_tokens() -> None:
    """MinT's Chinese documentation sends it so; its client adds weights of the same length."""
    (found,) = check(datum(logprobs=[-1, -2, -3], advantages=[0.5], weights=[1]), loss="importance_sampling")
    assert found.inputs["advantages"].tolist() == [0.5, 0.5, 0.5]
    assert found.inputs["weights"].tolist() == [1, 1, 1]


WIDE = [[2, 3], [3, 4], [4, 5]]


def test_two_dimensional_targets_are_accepted() -> None:
    weights = [[0.5, 0.5], [1, 0], [0, 0]]
    assert check(datum(targets=WIDE, weights=weights))[0].inputs["weights"].tolist() == weights
    (found,) = check(datum(targets=WIDE, weights=[1, 2, 3, 4, 5, 6], mask=[0, 1, 2]))  # flat, and one for each row
    assert found.inputs["weights"].tolist() == [[0, 0], [3, 4], [10, 12]]


def test_optional_loss_inputs_are_kept() -> None:
    bounds = {"clip_low_threshold": [0.5, 0.6, 0.7], "clip_high_threshold": [1.5, 1.6, 1.7]}
    (found,) = check(datum(**RATIO, **bounds, sequence_ratio_mask=[0, 1, 1]), loss="gspo")
    assert found.inputs["sequence_ratio_mask"].tolist() == [0, 1, 1]
    np.testing.assert_allclose(found.inputs["clip_high_threshold"], bounds["clip_high_threshold"])
    (found,) = check(datum(**RATIO, **bounds, sequence_ratio_mask=[0, 1, 1]), loss="dro")
    assert found.inputs.keys() == {"logprobs", "advantages", "weights"}


def test_invalid_batches_are_refused() -> None:
    fine = datum(weights=[1, 1, 1])
    refused("data are empty", *[])
    refused(r"data\[1\] has an empty model_input", fine, datum([], [], weights=[]))
    refused(r"data\[0\] has 3 tokens, more than the base's 2 positions", fine, max_length=2)
    refused("the call has 6 tokens, more than 5", fine, fine, max_tokens=5)
    assert len(check(fine, fine, max_length=3, max_tokens=6, vocab_size=5)) == 2


@pytest.mark.parametrize("targets", [[2, 3], [2, 3, 4, 5], [[2, 3, 4]], [[], [], []], 2])
def test_targets_of_wrong_length_are_refused(targets: Any) -> None:
    refused(r"data\[0\].target_tokens have shape", datum(targets=targets, weights=[1, 1, 1]))


@pytest.mark.parametrize("wrong", [-1, -100, 10, 2**31 - 1, -(2**63), 2**63 - 1])
def test_token_ids_outside_the_vocabulary_are_refused(wrong: int) -> None:
    refused(rf"model_input has id {wrong} at index 1", datum(tokens=[1, wrong, 3], weights=[1, 1, 1]))
    refused(rf"target_tokens has id {wrong} at index 2", datum(targets=[2, 3, wrong], weights=[1, 1, 1]))
    wide = [[2, 3], [3, wrong], [4, 5]]
    refused(rf"target_tokens has id {wrong} at index 3", datum(targets=wide, weights=np.zeros((3, 2))))


def test_missing_inputs_are_named() -> None:
    for loss in POLICY_LOSSES:
        refused(f'no logprobs, advantages, which loss "{loss}" needs', datum(weights=[1, 1, 1]), loss=loss)
        refused(f'no advantages, which loss "{loss}" needs', datum(logprobs=[-1, -1, -1]), loss=loss)


def test_missing_cross_entropy_weights_default_to_one() -> None:
    bare, given = check(datum(), datum(weights=[0, 0, 1]))
    assert bare.inputs["weights"].tolist() == [1, 1, 1] and given.inputs["weights"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", ["logprobs", "advantages", "mask", "clip_low_threshold"])
@pytest.mark.parametrize("values", [[1, 1], [1, 1, 1, 1], [[1, 1, 1]], []])
def test_inputs_of_wrong_shape_are_refused(name: str, values: Any) -> None:
    refused(rf"data\[0\].loss_fn_inputs.{name} has shape", datum(**{**RATIO, name: values}), loss="ppo")


def test_scalar_logprobs_are_not_broadcast() -> None:
    refused("logprobs has shape", datum(logprobs=[-1], advantages=[1]), loss="ppo")


@pytest.mark.parametrize("name", ["logprobs", "advantages", "mask", "clip_high_threshold"])
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_nonfinite_inputs_are_refused(name: str, value: float) -> None:
    refused(f"{name} is .* at index 1", datum(**{**RATIO, name: [0.5, value, 0.5]}), loss="ppo")


def test_overflowing_weight_products_are_refused() -> None:
    refused("too large", datum(weights=[3e38, 1, 1], mask=[10, 1, 1]))


def test_unknown_losses_and_options_are_refused() -> None:
    fine = datum(**RATIO)
    refused('loss "pppo" is not served here: there is cross_entropy, ', fine, loss="pppo")
    refused("is not served here", fine, loss="x" * 10_000)
    refused('"cross_entropy" has no option "beta": it has weighted_only', fine, options={"beta": 1.0})
    refused('"ppo" has no option "beta": it has clip_low_threshold', fine, loss="ppo", options={"beta": 1.0})
    refused("beta is 'high'", fine, loss="dro", options={"beta": "high"})
    for value in (NAN, float("inf"), -1.0):
        refused("beta is", fine, loss="dro", options={"beta": value})
    refused("above clip_high_threshold", fine, loss="ppo", options={"clip_low_threshold": 1.5})


def test_known_options_are_accepted() -> None:
    bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": 5.0}
    for loss in ("ppo", "cispo", "gspo"):
        check(datum(**RATIO), loss=loss, options=bounds)
    check(datum(**RATIO), loss="dro", options={"beta": 0.05})


def test_gspo_needs_one_sampled_sequence() -> None:
    wide = {name: np.ones((3, 2)) for name in RATIO}
    check(datum(targets=WIDE, **wide), loss="ppo")
    refused("two-dimensional", datum(targets=WIDE, **wide), loss="gspo")
    refused("marks no token", datum(**RATIO, sequence_ratio_mask=[0, 0, 0]), loss="gspo")


def test_optional_inputs_are_in_all_data_or_none() -> None:
    bounded = datum(**RATIO, clip_low_threshold=[0.5, 0.5, 0.5])
    assert len(check(bounded, bounded, loss="ppo")) == 2
    refused("some data have clip_low_threshold", bounded, datum(**RATIO), loss="ppo")
