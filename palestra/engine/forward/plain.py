"""The plain path: the model's own forward and transformers' own cache, for models that cannot run on packed rows.

Recurrent layers, convolutions and attention of other kinds mix neighbouring tokens of a row, so sequences cannot share
one. Here every sequence is a row of its own. In training, the sequences of a forest are unrolled and padded on the
right, which no causal model sees from the left. In sampling, only sequences of equal length share a batch, since
padding would enter a recurrent state. The results are the model's own. Shared prefixes are computed again for each
sequence, so this is slower.

Everything around a pass is the same as on the packed path: flat rows go in and come out.

Shapes: `S` tokens of a flat row, `M` rows that are kept, `B` sequences of a batch, `T` tokens of the longest, `H` width
of the model, `V` vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.engine.forward.decoder import decoder_of
from palestra.engine.forward.flat_row import groups_to_pad
from palestra.engine.forward.length_limit import check_length
from palestra.engine.forward.tree_attention import Forest, TreeLayout

Engine = Any  # of models.py, which imports this module
AdapterRoute = Any
CACHE_NAMES = ("past_key_values", "cache_params")  # of attention and of state-space models


class UnrolledPath(NamedTuple):
    """A sequence of a forest up to its last row that is kept: the flat indices of its tokens, and which of these are
    read from this sequence (positions)."""

    path: np.ndarray
    read: np.ndarray


class PlainPath:
    """Runs the model of `engine` as transformers does. `reason` says why it is not on packed rows; with `uses_cache`
    false each new token computes the whole sequence again."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reason = ""
        self.uses_cache = True
        decoder: Any = decoder_of(engine.model)
        self._own_forward = decoder.forward
        accepted = inspect.signature(decoder.forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in accepted), None)
        self._takes_positions = "position_ids" in accepted  # some models guess positions wrongly from their cache
        self._output_class: Any = None
        self._known: Tensor | None = None
        decoder.forward = self._forward

    def _forward(self, *args: Any, layout: Any = None, keep_M: Tensor | None = None, **kwargs: Any) -> Any:
        """Replaces the decoder's forward. Returns the hidden states that were given for the head, if any; runs the
        sequences of `layout`, if given; else runs the decoder's own forward."""
        if self._known is not None:
            return self._output_class(last_hidden_state=self._known)
        if layout is None:
            return self._own_forward(*args, **kwargs)
        hidden_MH = self.hidden_states(layout, keep_M)
        return self._output_class(last_hidden_state=hidden_MH[None])

    # -- training ------------------------------------------------------------------------------------------------------

    def hidden_states(self, layout: TreeLayout, keep_M: Tensor | None) -> Tensor:
        """Returns the last hidden states [M, H] of the rows `keep_M` (None: all) of a forest's flat row, under the
        engine's current route."""
        forest = layout.forest
        size = len(forest.ids_S)
        first = 0
        outputs = []
        rows = []
        keep = np.arange(size) if keep_M is None else keep_M.cpu().numpy()
        route = self.engine.route
        for of_block, count in route.blocks(size) if route else [(None, size)]:
            wanted_S = np.zeros(size, bool)
            wanted_S[keep[(keep >= first) & (keep < first + count)]] = True
            unrolled = sorted(_covering(forest, wanted_S), key=lambda item: len(item.path))
            for batch in groups_to_pad(unrolled, lambda item: (1, len(item.path))):
                outputs.append(self._run(forest, batch, of_block))
                rows += [path[read] for path, read in batch]
            first += count
        order = np.argsort(np.concatenate(rows))  # each row is read once; kept rows rise
        return torch.cat(outputs).index_select(0, self.engine.tensor(order))

    def _run(self, forest: Forest, batch: Sequence[UnrolledPath], route: AdapterRoute | None) -> Tensor:
        """Returns the hidden states of the tokens that are read from each sequence, one after the other."""
        longest = max(len(item.path) for item in batch)
        check_length(self.engine.model.config.get_text_config(), longest)
        ids_BT = np.zeros((len(batch), longest), np.int64)
        for row, (path, _) in enumerate(batch):
            ids_BT[row, : len(path)] = forest.ids_S[path]
        with self.engine.use_route(route):
            out = self._own_forward(input_ids=self.engine.tensor(ids_BT), use_cache=False)
        self._output_class = type(out)
        read = np.concatenate([row * longest + item.read for row, item in enumerate(batch)])
        hidden: Tensor = out.last_hidden_state
        return hidden.flatten(0, 1).index_select(0, self.engine.tensor(read))

    def head_logits(self, hidden_MH: Tensor) -> Tensor:
        """Returns the logits [M, V] of last hidden states, by the model itself, which may scale or cap them."""
        self._known = hidden_MH[None]
        try:
            # an id for each row: some models look at the shape of their input
            ids = torch.zeros(1, len(hidden_MH), dtype=torch.long, device=hidden_MH.device)
            model = self.engine.model  # the class's forward: see Engine.head_logits
            logits: Tensor = type(model).forward(model, input_ids=ids, use_cache=False).logits.squeeze(0)
        finally:
            self._known = None
        return logits

    # -- sampling ------------------------------------------------------------------------------------------------------

    def prefill(self, ids_BT: Tensor, route: AdapterRoute | None) -> tuple[Tensor, Any]:
        """Returns the logits [B, V] after sequences of equal length, and transformers' cache of them (None if the model
        returns none that can be split by sequence)."""
        return self._forward_cached(ids_BT, {}, route)

    def decode(self, ids_B: Tensor, position: int, cache: Any, route: AdapterRoute | None) -> tuple[Tensor, Any]:
        """Returns the logits [B, V] after one more token, at `position`, of each sequence in `cache`, and the cache,
        changed in place."""
        assert self._cache_name is not None
        where = {"position_ids": torch.full_like(ids_B, position)[:, None]} if self._takes_positions else {}
        return self._forward_cached(ids_B[:, None], {self._cache_name: cache, **where}, route)

    def _forward_cached(self, ids_BT: Tensor, more: dict[str, Any], route: AdapterRoute | None) -> tuple[Tensor, Any]:
        with self.engine.use_route(route):
            out = self._own_forward(input_ids=ids_BT, use_cache=self.uses_cache, **more)
            self._output_class = type(out)
            logits_BV = self.head_logits(out.last_hidden_state[:, -1])
        cache = getattr(out, self._cache_name or "", None)
        if not self.uses_cache or not hasattr(cache, "reorder_cache"):
            return logits_BV, None
        return logits_BV, cache


def _covering(forest: Forest, wanted_S: np.ndarray) -> list[UnrolledPath]:
    """Returns sequences of the forest that contain all wanted tokens, each of which is read from one of them. Clears
    `wanted_S`."""
    unrolled = []
    for _, path in sorted(forest.segments, key=lambda segment: -len(segment[1])):
        read = np.flatnonzero(wanted_S[path])
        if len(read):
            unrolled.append(UnrolledPath(path[: read[-1] + 1], read))
            wanted_S[path] = False
    return unrolled
