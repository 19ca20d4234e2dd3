"""Validation of training calls against a base model and a loss, and conversion of their data to the loss's inputs.

Invalid calls are rejected before they are queued. The message names the fault, its place, and what to send instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from palestra.core.types import Datum
from palestra.service.wire import codec
from palestra.service.wire.jobs import DistillExampleJob
from palestra.service.wire.schemas.requests import MAX_ID_CHARS, ReverseKLDatum
from palestra.service.wire.schemas.wire_model import BadRequest

CLIP_OPTIONS = ("clip_low_threshold", "clip_high_threshold")
WEIGHTED_ONLY = "weighted_only"  # extension: targets of weight 0 get no log-probability
WEIGHT_INPUTS = ("weights", "mask", "loss_mask")  # names of token weights; they are multiplied
BROADCAST_INPUTS = (*WEIGHT_INPUTS, "advantages")  # broadcast from one number, or from one per row of 2-D targets


class LossSpec(NamedTuple):
    """A loss of the wire: the name of its formula in `core.losses.LOSSES`, the inputs it requires, the inputs it
    accepts, its options, and the default bounds of the ratio: those of official servers (Tinker cookbook, tutorial 202;
    gspo's are not documented). With `for_runs` false, runs compute the formula themselves."""

    formula: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    ratio_bounds: tuple[float, float] | None = None
    for_runs: bool = True


_RATIO = ("logprobs", "advantages")
LOSS_SPECS = {
    "cross_entropy": LossSpec("cross_entropy"),  # missing weights are ones, as on hosted services
    "importance_sampling": LossSpec("importance_sampling", _RATIO),
    "ppo": LossSpec(  # the entropy bonus is an extension
        "clipped_policy", _RATIO, CLIP_OPTIONS, (*CLIP_OPTIONS, "entropy"), ratio_bounds=(0.8, 1.2)
    ),
    "cispo": LossSpec("cispo", _RATIO, CLIP_OPTIONS, CLIP_OPTIONS, ratio_bounds=(0.0, 4.0)),
    # its penalty has no advantage to carry a token's share
    "dro": LossSpec("dro", _RATIO, (), ("beta",), for_runs=False),
    "gspo": LossSpec("gspo", _RATIO, (*CLIP_OPTIONS, "sequence_ratio_mask"), CLIP_OPTIONS, ratio_bounds=(0.8, 1.2)),
}


# What its formula is, and what is recorded for it, is known to the hosted service only (docs of the client 0.38.0)
STABLE_REINFORCE = (
    'loss "stable_reinforce" is not served here, since its formula is not public: set loss_fn to importance_sampling, '
    "ppo, cispo or gspo (recipes of the cookbook: loss_fn=importance_sampling)"
)

# inputs that some loss reads; `target_tokens` are apart
INPUT_NAMES = {*WEIGHT_INPUTS, *(name for spec in LOSS_SPECS.values() for name in (*spec.required, *spec.optional))}


def check_input_names(call_data: Sequence[Datum]) -> None:
    """Raises BadRequest for an input that no loss reads. A forward pass may have it, for a loss of the client's own."""
    for index, datum in enumerate(call_data):
        if unread := sorted(datum.inputs.keys() - INPUT_NAMES):
            raise BadRequest(
                f"data[{index}].loss_fn_inputs.{unread[0][:MAX_ID_CHARS]} is read by no loss: leave it out "
                f"({', '.join(sorted(INPUT_NAMES))} are)"
            )


def check_train_call(
    call_data: Sequence[Datum],
    loss: str,
    options: Mapping[str, float | str],
    *,
    vocab_size: int,
    max_length: int,
    max_tokens: int,
) -> list[Datum]:
    """Returns the data with exactly the inputs that `loss` reads, each float32 in the shape of the targets; `weights`
    are always present.

    Inputs of other losses are dropped, because clients send one datum to several losses. `vocab_size` is
    the number of token ids of the base, `max_length` its positions, `max_tokens` the limit for one call. Raises
    BadRequest if the loss, its options or the data are invalid.
    """
    if loss == "stable_reinforce":
        raise BadRequest(STABLE_REINFORCE)
    if loss not in LOSS_SPECS:
        raise BadRequest(f'loss "{loss[:MAX_ID_CHARS]}" is not served here: there is {", ".join(LOSS_SPECS)}')
    _check_options(loss, options)
    _check_size(call_data, max_length, max_tokens)
    data = []
    for index, datum in enumerate(call_data):
        place = f"data[{index}]"
        _check_ids(place, datum, vocab_size)
        data.append(_clean_inputs(place, datum, loss))
    for name in LOSS_SPECS[loss].optional:
        if len({name in datum.inputs for datum in data}) > 1:
            raise BadRequest(f"some data have {name}, others not. Send it with all of a call's data or with none.")
    return data


def check_reverse_kl(
    data: Sequence[ReverseKLDatum], *, vocab_size: int, max_length: int, max_tokens: int
) -> list[DistillExampleJob]:
    """Returns the validated examples of a reverse-KL call, whose `target_tokens` answer both prompts.

    The arguments are those of `check_train_call`. Raises BadRequest if an id, a shape, a weight or a length is invalid.
    """
    examples = [_check_example(f"data[{index}]", datum, vocab_size, max_length) for index, datum in enumerate(data)]
    total = sum(len(prompt) + len(x.answer) for x in examples for prompt in (x.student, x.reference))
    if total > max_tokens:
        raise BadRequest(f"the call has {total} tokens, more than {max_tokens}. Send the data in several calls.")
    return examples


def _check_example(place: str, datum: ReverseKLDatum, vocab: int, max_length: int) -> DistillExampleJob:
    answer = codec.decode_array(datum.target_tokens)
    weights = codec.decode_array(datum.weights)
    if answer.ndim != 1 or answer.dtype.kind != "i" or not answer.size:
        raise BadRequest(f"{place}.target_tokens must be the ids of an answer: int64, one dimension, at least one")
    if weights.shape != answer.shape or not np.isfinite(weights).all():
        raise BadRequest(f"{place}.weights must be a finite number for each of the {len(answer)} target_tokens")
    prompts = {name: codec.prompt_tokens(getattr(datum, name)) for name in ("student_input", "reference_input")}
    for name, prompt in prompts.items():
        length = len(prompt) + len(answer) - 1
        if not len(prompt) or length > max_length:
            raise BadRequest(
                f"{place}.{name} has {len(prompt)} tokens, and the answer {len(answer)}. Send a prompt of at least one "
                f"token that leaves room for the answer in the base's {max_length} positions."
            )
    for name, ids in {**prompts, "target_tokens": answer}.items():
        _check_range(f"{place}.{name}", ids, vocab)
    student, reference = (prompt.tolist() for prompt in prompts.values())
    return DistillExampleJob(student=student, reference=reference, answer=answer.tolist(), weights=weights.tolist())


def _check_options(loss: str, options: Mapping[str, float | str]) -> None:
    known = (*LOSS_SPECS[loss].options, WEIGHTED_ONLY)
    for name, value in options.items():
        if name not in known:
            raise BadRequest(f'loss "{loss}" has no option "{name[:MAX_ID_CHARS]}": it has {", ".join(known)}')
        if isinstance(value, str) or not 0 <= value < math.inf:
            raise BadRequest(f"option {name} is {str(value)[:MAX_ID_CHARS]!r}. Send a finite number of at least 0.")
    low, high = (options.get(name, default) for name, default in zip(CLIP_OPTIONS, (0.8, 1.2), strict=True))
    if float(low) > float(high):
        raise BadRequest(
            f"clip_low_threshold is {low}, above clip_high_threshold, which is {high}. They bound a ratio."
        )


def _check_size(data: Sequence[Datum], max_length: int, max_tokens: int) -> None:
    if not data:
        raise BadRequest("data are empty. Send at least one sequence.")
    for index, datum in enumerate(data):
        length = len(datum.tokens)
        if not length:
            raise BadRequest(f"data[{index}] has an empty model_input. Leave such sequences out.")
        if length > max_length:
            raise BadRequest(f"data[{index}] has {length} tokens, more than the base's {max_length} positions. Cut it.")
    total = sum(len(datum.tokens) for datum in data)
    if total > max_tokens:
        raise BadRequest(f"the call has {total} tokens, more than {max_tokens}. Send the data in several calls.")


def _check_ids(place: str, datum: Datum, vocab: int) -> None:
    shape = datum.targets.shape
    if len(shape) not in (1, 2) or shape[0] != len(datum.tokens) or not datum.targets.size:
        raise BadRequest(
            f"{place}.target_tokens have shape {list(shape)}, but model_input has {len(datum.tokens)} tokens. "
            "Position i of the input predicts target i: send one target, or one row of K targets, for each."
        )
    for name, ids in (("model_input", datum.tokens), ("target_tokens", datum.targets)):
        _check_range(f"{place}.{name}", ids, vocab)


def _check_range(place: str, ids: np.ndarray, vocab: int) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(wrong):
        raise BadRequest(
            f"{place} has id {ids.flat[wrong[0]]} at index {wrong[0]}, but the base's ids go from 0 to "
            f"{vocab - 1}. Use the base's own tokenizer, and weight 0 for what is not to be trained."
        )


def _clean_inputs(place: str, datum: Datum, loss: str) -> Datum:
    needs = LOSS_SPECS[loss].required
    takes = LOSS_SPECS[loss].optional
    if loss == "gspo" and datum.targets.ndim != 1:
        raise BadRequest(f"{place}.target_tokens are two-dimensional, but gspo reads one sampled sequence")
    masks = [name for name in WEIGHT_INPUTS if name in datum.inputs]
    missing = [name for name in needs if name not in datum.inputs]
    if missing:
        raise BadRequest(f'{place}.loss_fn_inputs has no {", ".join(missing)}, which loss "{loss}" needs')
    names = [name for name in (*needs, *takes) if name in datum.inputs and name not in WEIGHT_INPUTS]
    inputs = {name: _fit_shape(f"{place}.loss_fn_inputs.{name}", datum, name) for name in (*names, *masks)}
    weights = np.ones(datum.targets.shape, np.float32)
    with np.errstate(over="ignore"):
        for name in masks:
            weights = weights * inputs.pop(name)
    if not np.isfinite(weights).all():
        raise BadRequest(f"{place}.loss_fn_inputs: {' times '.join(masks)} is too large a number. Send smaller ones.")
    if "sequence_ratio_mask" in inputs and not inputs["sequence_ratio_mask"].any():
        raise BadRequest(f"{place}.loss_fn_inputs.sequence_ratio_mask marks no token. Mark those that were sampled.")
    return replace(datum, inputs={**inputs, "weights": weights})


def _fit_shape(place: str, datum: Datum, name: str) -> np.ndarray:
    """Returns one input in the targets' shape, broadcast where `BROADCAST_INPUTS` allows it. Raises BadRequest if it
    does not fit or is not finite."""
    array = datum.inputs[name]
    shape = datum.targets.shape
    wrong = np.flatnonzero(~np.isfinite(array))
    if len(wrong):
        raise BadRequest(f"{place} is {array.flat[wrong[0]]} at index {wrong[0]}. Send finite numbers.")
    if array.ndim == 1 and array.size == datum.targets.size:
        return array.reshape(shape)  # some clients flatten matrices and send no shape
    if name in BROADCAST_INPUTS and array.size == 1:
        return np.full(shape, array.item(), np.float32)
    if name in BROADCAST_INPUTS and array.shape == shape[:1]:
        return np.repeat(array[:, None], shape[1], axis=1)
    if array.shape != shape:
        raise BadRequest(
            f"{place} has shape {list(array.shape)}, but target_tokens have {list(shape)}. Make them equal."
        )
    return array
