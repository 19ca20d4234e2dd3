"""Decoding steps as CUDA graphs: one launch runs all kernels of a step. To launch them one by one takes the CPU longer
than the GPU needs to run them.

A graph repeats the same kernels on the same memory. A step is therefore recorded for a number of rows and a width of
page tables, padded up to the next of a few sizes; tokens, lengths, page tables and the adapter of each row are copied
into tensors that it reads, and adapters into the matrices of step_routes.py. A graph is used only after it has given
the logits of the plain step (cached_attention.py); if it differs, or the model cannot be recorded, steps run plainly
from then on, with a warning.

Shapes: `R` rows, `W` width of the page tables, `V` vocabulary.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.engine.bases.model import Engine
from palestra.engine.cache.cached_attention import DecodeLayout, as_wide_as_cache
from palestra.engine.cache.kv_cache import pages_of
from palestra.engine.cache.kv_pages import PAGE_TOKENS, CacheSlot, PagePool
from palestra.engine.check.self_check import compare_gaps
from palestra.engine.cuda.paged_attention import MAX_WIDTH, PageTable, paged_attention, power_of_2, write_to_pages
from palestra.engine.cuda.rotary import fused_rotary, watched_rotary
from palestra.engine.cuda.step_routes import AdapterColumns, ColumnRoute, JoinedLayers, WatchedRoute, join_layers
from palestra.engine.forward.attention_terms import NO_TERMS, AttentionTerms, KeySpan
from palestra.engine.forward.flat_row import AdapterRoute
from palestra.engine.lora.low_rank import RowColumns, columns_of, padded_rank
from palestra.engine.lora.routes import MultiAdapterRoute

MIN_USES = 2  # a step is recorded at its second use: recording takes as long as five plain steps
MIN_COVERED_USES = 256  # later if a recorded step with more rows covers it: few rows take a GPU about as long
MAX_COVER = 8  # maximum ratio of rows recorded to rows in use: each further row repeats the attention of the last one
COLUMN_STEP = 64  # columns: room for adapters is made for 1, 2, 3, 4, 6, 8, ... times as many
MAX_STEPS = 64  # recorded steps that are kept: each takes some megabytes
MIN_TABLE_WIDTH = 16
NUM_SCALARS = 5  # of a row, before its page table: token, lengths of prompt and answer, columns of its adapter

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class DecodeStep(NamedTuple):
    """One decoding step: the cache slots of each row's prompt and answer, its last token, and the adapters."""

    prompts: Sequence[CacheSlot]
    answers: Sequence[CacheSlot]
    tokens: Sequence[int]
    route: MultiAdapterRoute | None

    def logits(self, engine: Engine, route: AdapterRoute | None = None) -> Tensor:
        """Returns the logits [R, V] of the plain step, under `route` (None: the step's own)."""
        layout = DecodeLayout(self.prompts, self.answers)
        every = engine.tensor(range(len(self.tokens)))
        positions = engine.tensor(layout.position_R)
        return engine.logits(engine.tensor(self.tokens), positions, layout, route or self.route, every)


class StepShape(NamedTuple):
    """Shape of a recorded step: numbers of rows, of places in a page table and of adapter columns, the largest rank,
    and the names of the adapted layers."""

    rows: int
    width: int
    columns: int
    rank: int
    layers: frozenset[str]

    def has_room_for(self, other: StepShape) -> bool:
        """Returns whether a step of the shape `other` can be computed as one of this shape."""
        return (
            other.rows <= self.rows <= MAX_COVER * other.rows
            and self.width >= other.width
            and self.columns >= other.columns
            and self.rank >= other.rank
            and self.layers == other.layers
        )


class DecodeGraphs:
    """Records the decoding steps of an engine whose cache has one pool, and repeats them. `record(compute)` runs
    `compute` and returns a function that runs it again, and its result, which that function overwrites."""

    def __init__(self, engine: Engine, record: Record | None = None) -> None:
        self.engine = engine
        self._record = record or CudaRecorder()
        self.refusal = ""  # why steps run plainly
        self.num_repeated = 0  # steps that were repeated
        self._steps: dict[StepShape, RecordedStep] = {}
        self._uses: Counter[StepShape] = Counter()
        self._columns: dict[tuple[int, frozenset[str]], AdapterColumns] = {}
        self._joined: dict[str, JoinedLayers] | None = None
        self._weights = list(engine.model.parameters())
        self._memory: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # addresses of the weights and of the cache

    def logits(self, step: DecodeStep) -> Tensor:
        """Returns the logits [R, V] of a step, which the next call may overwrite."""
        shape = None if self.refusal else self._shape(step)
        if shape is None:
            return step.logits(self.engine)
        self._follow_memory(step.answers[0].pool)
        recorded = self._covering(shape)
        self._uses[shape] += 1
        if recorded != shape and self._uses[shape] >= (MIN_COVERED_USES if recorded else MIN_USES):
            own_RV = step.logits(self.engine)
            if not own_RV.isnan().any():  # an adapter without bound, which says nothing about recording
                self._add(shape, step, own_RV)
            return own_RV
        if recorded is None:
            return step.logits(self.engine)
        self.num_repeated += 1
        return self._steps[recorded](step)

    def _covering(self, shape: StepShape) -> StepShape | None:
        """Returns the smallest recorded shape with room for a step of `shape`; None if there is none."""
        fits = [recorded for recorded in self._steps if recorded.has_room_for(shape)]
        return min(fits, key=lambda recorded: recorded[:4], default=None)

    def clear(self) -> None:
        """Drops all recorded steps, with their memory."""
        self._steps.clear()
        self._columns.clear()

    def _follow_memory(self, pool: PagePool) -> None:
        """Drops the recorded steps if weights or cache are no longer where they were."""
        weights = tuple(w.data_ptr() for w in self._weights)
        cache = (*(kv.data_ptr() for kv in pool.kv), pool.num_pages)
        if weights != self._memory[0]:
            self._joined = None
        if (weights, cache) != self._memory:
            self.clear()
            self._memory = weights, cache

    def _join(self, step: DecodeStep) -> dict[str, JoinedLayers]:
        """Joins the layers of the same input, unless that has been done since the weights were moved; returns them."""
        if self._joined is None:
            watched = WatchedRoute(step.route)
            with watched_rotary(self.engine.model):
                step.logits(self.engine, watched)
            joined = join_layers(watched.calls)
            self._follow_memory(step.answers[0].pool)
            self._joined = joined
        return self._joined

    def _shape(self, step: DecodeStep) -> StepShape | None:
        """Returns the shape to record a step for; None if it is not to be recorded."""
        if step.answers[0].pool.kv[0].shape[-1] > MAX_WIDTH or self.engine.sharded_params:
            return None
        pages = max(
            pages_of(prompt.length) + pages_of(answer.length)
            for prompt, answer in zip(step.prompts, step.answers, strict=True)
        )
        width = max(MIN_TABLE_WIDTH, power_of_2(pages))
        rows = _next_size(len(step.tokens))
        if step.route is None:
            return StepShape(rows, width, 0, 0, frozenset())
        stack = step.route.stack
        if not stack.mergeable:
            return None
        columns = _next_size(-(-sum(stack.ranks) // COLUMN_STEP)) * COLUMN_STEP
        return StepShape(rows, width, columns, padded_rank(stack.ranks), stack.adapted_layers)

    def _add(self, shape: StepShape, step: DecodeStep, own_RV: Tensor) -> None:
        """Records a step, whose logits are `own_RV`."""
        try:
            joined = self._join(step)
            key = (shape.columns, shape.layers)
            if key not in self._columns:
                stack = None if step.route is None else step.route.stack
                self._columns[key] = AdapterColumns(stack, shape.columns, joined)
            recorded = RecordedStep(self.engine, shape, step.answers[0].pool, self._columns[key])
            with fused_rotary():
                recorded.record(step, self._record)
            gaps = (torch.log_softmax(recorded(step).float(), -1) - torch.log_softmax(own_RV.float(), -1)).abs()
            gap, agrees = compare_gaps(gaps, self.engine.dtype)
            if not agrees:
                raise ValueError(f"a recorded step differs by {gap:.2g} nats from the plain one")
        except torch.OutOfMemoryError:
            self._uses[shape] = 0
            self.clear()
        except Exception as error:  # any code of any architecture
            self.refusal = f"{type(error).__name__}: {error!s:.300}"
            self.clear()
            warnings.warn(
                f"decoding of {self.engine.name} is not recorded as CUDA graphs, and takes longer: {self.refusal}",
                stacklevel=2,
            )
        else:
            while len(self._steps) >= MAX_STEPS:
                self._steps.pop(next(iter(self._steps)))
            self._steps[shape] = recorded
            used = {(kept.columns, kept.layers) for kept in self._steps}
            self._columns = {key: columns for key, columns in self._columns.items() if key in used}


class RecordedStep:
    """A step of one shape, recorded, with the tensors that it reads."""

    def __init__(self, engine: Engine, shape: StepShape, pool: PagePool, columns: AdapterColumns) -> None:
        self.engine = engine
        self.shape = shape
        self.pool = pool
        self.columns = columns
        cuda = engine.device.type == "cuda"
        self._host = torch.zeros(shape.rows, NUM_SCALARS + shape.width, dtype=torch.long, pin_memory=cuda)
        self._inputs = self._host.to(engine.device)
        self._every = torch.arange(shape.rows, device=engine.device)

    def record(self, step: DecodeStep, record: Record) -> None:
        """Records the step."""
        self._load(step)
        self._repeat, self._logits_RV = record(self._compute)

    def __call__(self, step: DecodeStep) -> Tensor:
        """Returns the logits [R, V] of a step, which the next call overwrites."""
        self._load(step)
        self._repeat()
        return self._logits_RV[: len(step.tokens)]

    def _load(self, step: DecodeStep) -> None:
        """Copies a step to where the recorded one reads. Rows beyond its own repeat the last one, and write the same to
        the cache."""
        rows = len(step.tokens)
        values = self._host.numpy()
        values[:rows, 0] = step.tokens
        values[:rows, 1] = [slot.length for slot in step.prompts]
        values[:rows, 2] = [slot.length for slot in step.answers]
        for row, (prompt, answer) in enumerate(zip(step.prompts, step.answers, strict=True)):
            pages = prompt.pages[: pages_of(prompt.length)] + answer.pages[: pages_of(answer.length)]
            values[row, NUM_SCALARS : NUM_SCALARS + len(pages)] = pages
        if step.route is not None:
            self.columns.load(step.route.stack)
            bare = rows - step.route.rows
            values[:rows, 3:5] = columns_of([*step.route.counts, bare], [*step.route.stack.ranks, 0]).T
        values[rows:] = values[rows - 1]
        self._inputs.copy_(self._host, non_blocking=True)

    def _compute(self) -> Tensor:
        """Returns the logits [R, V] of the step that was loaded last."""
        token_R, prompt_R, answer_R, first_R, rank_R = self._inputs[:, :NUM_SCALARS].T.contiguous()
        layout = PagedLayout(self.pool, PageTable(self._inputs[:, NUM_SCALARS:], prompt_R, answer_R))
        route = ColumnRoute(self.columns, RowColumns(first_R, rank_R, self.shape.rank))
        return self.engine.logits(token_R, layout.position_R, layout, route, self._every)


class PagedLayout:
    """The attention layout of a decoding step with fixed shapes. `DecodeLayout` is the layout of a plain step."""

    def __init__(self, pool: PagePool, table: PageTable) -> None:
        self.pool = pool
        self.table = table
        self.position_R = table.length_R - 1
        last_R = table.answer_R - 1
        place_R = table.pages_of_prompts(PAGE_TOKENS) + last_R // PAGE_TOKENS
        page_R = table.page_RW.gather(1, place_R[:, None])
        heads = torch.arange(pool.kv_heads, device=page_R.device)
        self._writes = ((page_R * pool.kv_heads + heads) * PAGE_TOKENS + (last_R % PAGE_TOKENS)[:, None]).ravel()
        self._first: dict[KeySpan | None, Tensor] = {None: torch.zeros_like(last_R)}

    def attend(
        self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, terms: AttentionTerms = NO_TERMS
    ) -> Tensor:
        """Writes the new keys and values [h, R, D] of a layer to the cache; returns the attention output [R, H, D]."""
        out_width = v_HSD.shape[-1]
        q_HSD, k_HSD, v_HSD = as_wide_as_cache(self.pool, q_HSD, k_HSD, v_HSD)
        write_to_pages(self.pool.kv[layer], self._writes, k_HSD, v_HSD)
        if terms.span not in self._first:
            assert terms.span is not None
            self._first[terms.span] = terms.span.first_key(self.position_R)
        first_R = self._first[terms.span]
        out_RHD = paged_attention(q_HSD.transpose(0, 1), self.pool.kv[layer], self.table, first_R, scale, terms)
        return out_RHD[..., :out_width]


class CudaRecorder:
    """Records computations as CUDA graphs. All graphs share one pool of memory: no two run at a time, and the results
    of one are read before the next."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._anchor: tuple[torch.cuda.CUDAGraph, Tensor] | None = None  # keeps the pool: it ends with its last graph

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Records `compute`. Raises RuntimeError if it waits for the GPU, which cannot be recorded."""
        if self._anchor is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._anchor = self._capture(lambda: torch.zeros(1, device="cuda"))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()  # compiles kernels and makes workspaces, which may wait
            with waiting_forbidden():  # a capture that fails leaves torch's allocator and generators in disorder
                compute()
        torch.cuda.current_stream().wait_stream(side)
        graph, result = self._capture(compute)
        return graph.replay, result

    def _capture(self, compute: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may use the GPU meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = compute()
        except Exception:
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            generator.graphsafe_set_state(generator.clone_state())  # it would wait for the capture's end
            raise
        return graph, result


@contextlib.contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Context in which torch raises RuntimeError where the CPU would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_sync_debug_mode("error")
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


def _next_size(least: int) -> int:
    """Returns the first of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `least`."""
    power = power_of_2(least)
    between = power // 4 * 3
    return between if least <= between else power
