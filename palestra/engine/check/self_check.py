"""Decides at load how a model runs: on packed rows, on the plain path, or not at all.

The engine's passes are compared with the model's own eager forward of single unpadded sequences, on random tokens and
with adapters: a forest with shared prefixes in one pass, and prompts of several lengths, one of them longer than any
window, computed into the cache and continued token by token. No list of architectures is kept. A model whose packed
results differ runs on the plain path (plain.py) if its results there are right, and is refused otherwise.

Most of it runs on a small model of the same architecture (reduced_model.py), so that it takes well below a second for
any size; the model itself then computes a short prompt and a few tokens, which shows what its own weights and linear
layers do. A model of the same config and weights as one checked before in this process is not checked again.

Shapes: `T` tokens of a sequence, `V` vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from palestra.engine.cache.cached_attention import DecodeLayout, PrefillLayout
from palestra.engine.cache.kv_cache import KVCache
from palestra.engine.check.probe import UnsupportedAttention, restore_forwards, set_attention
from palestra.engine.check.reduced_model import reduced_model
from palestra.engine.check.reference_results import NUM_DECODED, Case, Expected, own_results
from palestra.engine.forward.tree_attention import TreeLayout, build_forest, concat_forests
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.routes import AdapterStack, MultiAdapterRoute, SingleAdapterRoute, SnapshotRoute

Engine = Any  # of models.py, which imports this module
TOLERANCE = 1e-3  # largest difference of a log-probability in nats, float32
HALF_TOLERANCE = 0.1  # mean difference in half precision, whose own rounding is 0.01 in most models
ROUNDING_FACTOR = 2  # of the model's own rounding, where that is more: 0.08 in a deep narrow one (SmolLM2-135M)

SEEDS = (0, 1)  # of the small model: experts that are chosen by nearly equal scores may differ with one of them

BuildEngine = Callable[[PreTrainedModel, bool], Engine]


class Way(NamedTuple):
    """A way to run a model: on packed rows or on the plain path, there with transformers' cache or without."""

    plain: bool
    uses_cache: bool
    name: str


PACKED = Way(False, True, "on packed rows")
PLAIN = Way(True, True, "by its own forward and cache")
UNCACHED = Way(True, False, "by its own forward, without a cache")


class Verdict(NamedTuple):
    """The way that was found for a model, and why the ways before it were rejected."""

    way: Way
    reason: str


_verdicts: dict[str, Verdict] = {}  # by config: a further model of it is checked in this way only, on a short prompt
_checked: set[bytes] = set()  # digests of configs and weights: an equal model is not checked again
MAX_DIGEST_BYTES = 2**26  # of weights: to read more of them takes as long as the check


class Mismatch(ValueError):
    """The engine's results differ from the model's own; the message says which and by how much."""


class Failure(Mismatch):
    """A pass ended with an error."""


def choose_engine(model: PreTrainedModel, base: str, build: BuildEngine) -> Engine:
    """Returns the engine of `model` that `build(model, plain)` makes: on packed rows if their results are the model's
    own, else on the plain path. Raises ValueError with the reasons if neither gives the model's own results."""
    key = json.dumps([model.config.to_dict(), str(model.dtype), model.device.type], default=str, sort_keys=True)
    known = _verdicts.get(key)
    set_attention(model, "eager")
    digest = _digest(model, key)
    if known and digest in _checked:
        return _accept(build(model, known.way.plain), known)
    subjects = _Subjects(model)
    reasons: list[str] = []
    ways = [PACKED, PLAIN, UNCACHED]
    if known:
        reasons += filter(None, [known.reason])
        ways = [known.way]
    try:
        subjects.own(long=False)
    except Failure as error:
        reasons.append(str(error))
        ways = []
    for way in ways:
        try:
            long = not known and not _small_agrees(subjects, way, build)
            engine = compare(model, way, build, subjects.own(long=long), keep=True)
        except Mismatch as error:
            reasons.append(f"{way.name} {error}")
        except UnsupportedAttention as error:
            reasons.append(str(error))
        else:
            _verdicts[key] = known or Verdict(way, "; ".join(reasons))
            if digest:
                _checked.add(digest)
            return _accept(engine, _verdicts[key])
    raise ValueError(
        f"cannot run {base!r} ({type(model).__name__}): its log-probabilities here would not be those of transformers: "
        f"{'; '.join(reasons)}. Use another base: docs/models.md lists those that run."
    )


def _digest(model: PreTrainedModel, key: str) -> bytes:
    """Returns a digest of the config `key` and of all weights of `model`; b"" if they are many, or not on the CPU."""
    weights = list(model.state_dict(keep_vars=True).items())
    if model.device.type != "cpu" or sum(weight.nbytes for _, weight in weights) > MAX_DIGEST_BYTES:
        return b""
    digest = hashlib.sha256(key.encode())
    for name, weight in weights:
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode())
        digest.update(weight.detach().reshape(-1).view(torch.uint8).numpy())
    return digest.digest()


def _accept(engine: Engine, verdict: Verdict) -> Engine:
    """Returns `engine`, which knows why it runs as it does."""
    if engine.plain_path:
        engine.plain_path.uses_cache = verdict.way.uses_cache
        engine.plain_path.reason = verdict.reason
    return engine


def small_verdict(model: PreTrainedModel, build: BuildEngine) -> Verdict:
    """Returns how a model will run, from small models of its kind alone: it may be without weights (on "meta"). Raises
    ValueError if no small model can be run, or the model is refused."""
    subjects = _Subjects(model)
    reasons = []
    for way in (PACKED, PLAIN, UNCACHED):
        try:
            if not _small_agrees(subjects, way, build):
                raise ValueError("how it runs is determined when it is loaded")
        except Mismatch as error:
            reasons.append(f"{way.name} {error}")
        except UnsupportedAttention as error:
            reasons.append(str(error))
        else:
            return Verdict(way, "; ".join(reasons))
    raise ValueError(f"refused: {'; '.join(reasons)}")


class _Subjects:
    """The models to compare and their own results: the model itself, and small ones by seed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._own: dict[bool, Expected] = {}
        self._small: dict[int, tuple[PreTrainedModel, Expected] | None] = {}

    def own(self, *, long: bool) -> Expected:
        """Returns the model's own results. Raises Failure if its own forward fails."""
        if long not in self._own:
            with failures("its own forward"):
                self._own[long] = own_results(self.model, long=long)
        return self._own[long]

    def small(self, seed: int) -> tuple[PreTrainedModel, Expected] | None:
        """Returns a small model and its own results; None if there is none that runs."""
        if seed not in self._small:
            self._small[seed] = None
            with contextlib.suppress(Failure), failures("its own forward"):
                if small := reduced_model(self.model, seed):
                    self._small[seed] = small, own_results(small, long=True)
        return self._small[seed]


def _small_agrees(subjects: _Subjects, way: Way, build: BuildEngine) -> bool:
    """Returns whether the results of a small model are its own; False if none runs. Raises Mismatch if they are not."""
    wrong = None
    for seed in SEEDS:
        if (subject := subjects.small(seed)) is None:
            return False
        try:
            compare(subject[0], way, build, subject[1])
        except Failure:
            return False
        except Mismatch as error:
            wrong = error
        else:
            return True
    raise wrong or AssertionError


@contextlib.contextmanager
def failures(what: str) -> Iterator[None]:
    """Context in which every error becomes a Failure of `what`."""
    try:
        yield
    except Mismatch:
        raise
    except Exception as error:  # any code of any architecture
        raise Failure(f"{what} fails ({type(error).__name__}: {error!s:.200})") from error


# -- comparisons -------------------------------------------------------------------------------------------------------


def compare(model: PreTrainedModel, way: Way, build: BuildEngine, expected: Expected, *, keep: bool = False) -> Engine:
    """Compares the passes of an engine of `model` with the `expected` results; returns the engine. Raises Mismatch or
    UnsupportedAttention. After an error, or without `keep`, the model has its own forwards again."""
    try:
        engine = build(model, way.plain)
        if engine.plain_path:
            engine.plain_path.uses_cache = way.uses_cache
        snapshots = [adapter.snapshot(str(i), engine.dtype) for i, adapter in enumerate(expected.adapters)]
        stack = AdapterStack(snapshots, engine.linear_layers)
        with torch.no_grad(), failures("a pass of training"):
            _match(engine, "a pass of training", _training_logits(engine, expected.cases, stack), expected)
            alone = expected.of(0)
            _match(engine, "a pass of training", _training_logits(engine, alone.cases, expected.adapters[0]), alone)
        with torch.no_grad(), failures("sampling"):
            cases = expected.cases
            sampled = _plain_logits(engine, cases, snapshots) if way.plain else _kv_logits(engine, cases, stack)
            _match(engine, "sampling", sampled, expected)
    except Exception:
        keep = False
        raise
    finally:
        if not keep:
            restore_forwards(model)
    return engine


def _match(engine: Engine, what: str, computed: Iterator[tuple[int, np.ndarray, Tensor]], expected: Expected) -> None:
    """Raises Mismatch unless the logits of each case, at the positions given, have the expected log-probabilities."""
    differences = []
    for number, positions, logits in computed:
        logp = expected.logp_TV[number][engine.tensor(positions)]
        differences.append((torch.log_softmax(logits.float(), -1) - logp).abs().flatten())
    gap, agrees = compare_gaps(torch.cat(differences), engine.dtype)
    if not (agrees or gap <= ROUNDING_FACTOR * expected.rounding):
        kinds = getattr(engine.model.config.get_text_config(), "layer_types", None)
        layers = f" (layers: {', '.join(sorted(set(kinds)))})" if kinds else ""
        raise Mismatch(f"{what} differs by {gap:.2g} nats{layers}")


def compare_gaps(gaps: Tensor, dtype: torch.dtype) -> tuple[float, bool]:
    """Returns the largest of the `gaps` of log-probabilities in nats (in half precision: their mean), and whether it is
    within its tolerance."""
    if dtype.itemsize < 4:
        gap = float(gaps.mean())
        return gap, gap <= HALF_TOLERANCE
    gap = float(gaps.max())
    return gap, gap <= TOLERANCE


def _training_logits(
    engine: Engine, cases: Sequence[Case], adapters: AdapterStack | Adapter
) -> Iterator[tuple[int, np.ndarray, Tensor]]:
    """Yields the number, positions and logits of each case, from one pass over a forest of each owner's sequences. With
    a single adapter, the head is a pass of its own, as in training of models that are not sharded."""
    owners = list(dict.fromkeys(case.owner for case in cases))
    tokens: dict[int | None, list[np.ndarray]] = {}
    for case in cases:
        tokens.setdefault(case.owner, []).append(case.tokens)
    forests = [build_forest(sequences) for sequences in tokens.values()]
    joined = concat_forests(forests)
    keep = np.flatnonzero(joined.positions_S > 0)  # not all rows: the check covers the selection, too
    layout = TreeLayout(joined, engine.device)
    ids_S = joined.ids_S
    positions_S = joined.positions_S
    row = engine.tensor(ids_S), engine.tensor(positions_S), layout
    if isinstance(adapters, Adapter):
        route = SingleAdapterRoute(adapters)
        logits_MV = engine.head_logits(engine.hidden_states(*row, route, engine.tensor(keep)), route)
    else:
        sizes = [len(forest.ids_S) for forest, owner in zip(forests, owners, strict=True) if owner is not None]
        logits_MV = engine.logits(*row, MultiAdapterRoute(adapters, sizes), engine.tensor(keep))
    for number, path in enumerate(joined.paths):
        yield number, np.arange(1, len(path)), logits_MV[engine.tensor(np.searchsorted(keep, path[1:]))]


def _kv_logits(engine: Engine, cases: Sequence[Case], stack: AdapterStack) -> Iterator[tuple[int, np.ndarray, Tensor]]:
    """Yields the number, position and logits of each case at each token from the last of its prompt on: prompts in one
    pass, then a token of every case at a time."""
    shape = engine.attention
    assert shape is not None
    cache = KVCache(shape.layers, shape.kv_heads, shape.width, engine.device, engine.dtype)
    keys = [(case.owner, case.prompt.tobytes()) for case in cases]
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    alone = sorted(first.values())
    slots = cache.allocate_prompts([len(cases[i].prompt) for i in alone], [keys.count(keys[i]) for i in alone])
    slot_of = {keys[i]: slot for i, slot in zip(alone, slots, strict=True)}
    layout = PrefillLayout(slots, np.zeros(len(slots), np.int64))
    ids = np.concatenate([cases[i].prompt for i in alone])
    route = _route(stack, [(cases[i].owner, len(cases[i].prompt)) for i in alone])
    logits_NV = engine.logits(engine.tensor(ids), layout.positions, layout, route, layout.last_N)
    for number, case in enumerate(cases):
        yield number, np.array([len(case.prompt) - 1]), logits_NV[alone.index(first[keys[number]])][None]
    answers = cache.allocate_answers([NUM_DECODED] * len(cases))
    route = _route(stack, [(case.owner, 1) for case in cases])
    every = engine.tensor(range(len(cases)))
    for step in range(NUM_DECODED):
        for slot in answers:
            slot.length = step + 1
        decoding = DecodeLayout([slot_of[key] for key in keys], answers)
        ids_R = engine.tensor([case.answer[step] for case in cases])
        position_R = np.array([len(case.prompt) + step for case in cases])
        logits_RV = engine.logits(ids_R, engine.tensor(position_R), decoding, route, every)
        yield from ((number, position_R[number : number + 1], logits_RV[number][None]) for number in range(len(cases)))


def _route(stack: AdapterStack, rows: Sequence[tuple[int | None, int]]) -> MultiAdapterRoute:
    """Returns the route of consecutive (owner, number of rows), the bare base last."""
    counts = Counter[int]()
    for owner, num_rows in rows:
        if owner is not None:
            counts[owner] += num_rows
    return MultiAdapterRoute(stack, list(counts.values()))


def _plain_logits(
    engine: Engine, cases: Sequence[Case], snapshots: Sequence[Any]
) -> Iterator[tuple[int, np.ndarray, Tensor]]:
    """Yields what `_kv_logits` yields, on the plain path: each prompt's cases share its cache."""
    path = engine.plain_path
    assert path is not None
    keys = [(case.owner, case.prompt.tobytes()) for case in cases]
    for key in dict.fromkeys(keys):
        numbers = [number for number, other in enumerate(keys) if other == key]
        first = cases[numbers[0]]
        route = None if first.owner is None else SnapshotRoute(snapshots[first.owner])
        logits_BV, cache = path.prefill(engine.tensor(first.prompt)[None], route)
        logits_BV = logits_BV.expand(len(numbers), -1)
        if cache is not None:
            cache.reorder_cache(engine.tensor([0] * len(numbers)))
        for step in range(NUM_DECODED + 1):
            position = len(first.prompt) + step - 1
            for row, number in enumerate(numbers):
                yield number, np.array([position]), logits_BV[row][None]
            if step == NUM_DECODED:
                break
            if cache is None:
                longer = np.stack([cases[i].tokens[: position + 2] for i in numbers])
                logits_BV, cache = path.prefill(engine.tensor(longer), route)
            else:
                ids_B = engine.tensor([cases[i].answer[step] for i in numbers])
                logits_BV, cache = path.decode(ids_B, position + 1, cache, route)
