"""Keys and values of what is being sampled: a prompt once per group of siblings, answers per sibling.

A group is one prompt with its K answers. Its prompt lies once in `prefix`, each answer in `suffix`; a decoding query
attends to both. Slots are kept dense: when a group ends, the last one moves into its place.

Shapes: `L` layers, `G` group slots, `K` siblings, `P` prompt positions, `T` answer positions, `R` live rows (siblings
still sampling), `N` groups of a prefill, `Q` new prompt tokens, `h` key-value heads, `H` query heads, `D` head width.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


class Cache:
    """Growing buffers `prefix [L, 2, G, h, P, D]` and `suffix [L, 2, G, h, K, T, D]`."""

    def __init__(self, layers: int, kv_heads: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.prefix = torch.zeros(layers, 2, 0, kv_heads, 0, width, device=device, dtype=dtype)
        self.suffix = torch.zeros(layers, 2, 0, kv_heads, 0, 0, width, device=device, dtype=dtype)

    def reserve(self, groups: int, siblings: int, prompt: int, answer: int) -> None:
        """Makes room, keeping what is there. Sizes grow by doubling, so that copies are few."""
        layers, _, g, h, p, d = self.prefix.shape
        _, _, _, _, k, t, _ = self.suffix.shape
        if groups > g or prompt > p:
            self.prefix = _grown(self.prefix, (layers, 2, _up(groups, g), h, _up(prompt, p), d))
        if groups > self.suffix.shape[2] or siblings > k or answer > t:
            slots = max(self.prefix.shape[2], self.suffix.shape[2])
            self.suffix = _grown(self.suffix, (layers, 2, slots, h, max(siblings, k), _up(answer, t), d))

    def shrink(self, siblings: int) -> None:
        """Drops the answers' buffer of an empty cache where it is not made for this number of siblings."""
        if self.suffix.shape[4] != siblings:
            self.suffix = self.suffix[:, :, :0, :, :0].clone()

    def move(self, source: int, target: int, prompt: int, answer: int) -> None:
        """Moves a group of `prompt` and `answer` positions to another slot."""
        self.prefix[:, :, target, :, :prompt] = self.prefix[:, :, source, :, :prompt]
        self.suffix[:, :, target, ..., :answer, :] = self.suffix[:, :, source, ..., :answer, :]

    def repeat(self, sources: np.ndarray, targets: np.ndarray, prompt: int) -> None:
        """Copies up to `prompt` positions of prompts from slots to others, where these are others."""
        other = sources != targets
        if other.any():
            device = self.prefix.device
            source, target = (torch.as_tensor(slots[other], device=device) for slots in (sources, targets))
            self.prefix[:, :, target, :, :prompt] = self.prefix[:, :, source, :, :prompt]

    def wipe(self, slots: slice) -> None:
        """Empties slots of what must not be left there."""
        self.prefix[:, :, slots] = 0
        self.suffix[:, :, slots] = 0

    def row(self, slot: int, sibling: int, prompt: int, answer: int) -> Tensor:
        """A copy of one sibling's keys and values, prompt then answer: [L, 2, h, prompt + answer, D]."""
        parts = [self.prefix[:, :, slot, :, :prompt], self.suffix[:, :, slot, :, sibling, :answer]]
        return torch.cat(parts, dim=-2)


def _up(need: int, have: int) -> int:
    return have if need <= have else max(need, min(2 * have, have + 1024))


def _grown(old: Tensor, shape: tuple[int, ...]) -> Tensor:
    new = old.new_zeros(shape)
    new[tuple(slice(n) for n in old.shape)] = old
    return new


class PrefillLayout:
    """New prompt tokens, written to their slots, attend to all earlier ones there (some may have been reused)."""

    def __init__(self, cache: Cache, slots_N: np.ndarray, starts_N: np.ndarray, lengths_N: np.ndarray) -> None:
        self.cache, device = cache, cache.prefix.device
        new_N = lengths_N - starts_N
        self.slots_N, self.p = torch.as_tensor(slots_N, device=device), int(lengths_N.max())
        self.group_S = np.repeat(np.arange(len(slots_N)), new_N)
        first_N = np.cumsum(new_N) - new_N
        self.position_S = np.arange(len(self.group_S)) + (starts_N - first_N)[self.group_S]
        self.positions = torch.as_tensor(self.position_S, device=device)
        self.slot_S = self.slots_N[self.group_S]
        self.last_N = torch.as_tensor(np.cumsum(new_N) - 1, device=device)
        self._ask(self.group_S, self.position_S)

    def _ask(self, group_M: np.ndarray, position_M: np.ndarray) -> None:
        """Sets whose queries attend: tokens at `position_M` of the groups `group_M`, which rise."""
        device, n = self.cache.prefix.device, len(self.slots_N)
        asked_N = np.bincount(group_M, minlength=n)
        column_M = np.arange(len(group_M)) - (np.cumsum(asked_N) - asked_N)[group_M]
        self.q = int(asked_N.max())
        gather, positions = np.zeros((2, n, self.q), np.int64)  # a padded query sees the first key
        gather[group_M, column_M], positions[group_M, column_M] = np.arange(len(group_M)), position_M
        self.gather = torch.as_tensor(gather.ravel(), device=device)
        self.back_M = torch.as_tensor(group_M * self.q + column_M, device=device)
        self.mask_N1QP = torch.as_tensor(np.arange(self.p) <= positions[:, :, None], device=device)[:, None]

    def narrow(self, keep_M: Tensor) -> PrefillLayout:
        narrowed, keep = copy.copy(self), keep_M.cpu().numpy()
        narrowed._ask(self.group_S[keep], self.position_S[keep])
        return narrowed

    def attend(self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> Tensor:
        kv = self.cache.prefix[layer]
        kv[0][self.slot_S, :, self.positions] = k_HSD.transpose(0, 1)
        kv[1][self.slot_S, :, self.positions] = v_HSD.transpose(0, 1)
        q = q_HSD[:, self.gather].view(q_HSD.shape[0], len(self.slots_N), self.q, -1).transpose(0, 1)
        k, v = kv[0, :, :, : self.p][self.slots_N], kv[1, :, :, : self.p][self.slots_N]
        gqa = q_HSD.shape[0] != k_HSD.shape[0]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask_N1QP, scale=scale, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(0, 1)[self.back_M]


class DecodeLayout:
    """One new token per live row: written to the row's answer, it attends to the shared prompt and its own answer."""

    def __init__(
        self, cache: Cache, slot_R: np.ndarray, sibling_R: np.ndarray, prompt_G: np.ndarray, answer_G: np.ndarray
    ) -> None:
        """`prompt_G` and `answer_G` are the lengths in each slot; the new token is the answer's last."""
        self.cache, device = cache, cache.prefix.device
        _, _, _, h, self.k, most, _ = cache.suffix.shape
        self.g, self.p, self.t = len(prompt_G), int(prompt_G.max()), int(answer_G.max())
        head_h = np.arange(h)
        place_Rh = (slot_R[:, None] * h + head_h) * self.k + sibling_R[:, None]
        self.at_Rh = torch.as_tensor((place_Rh * most + answer_G[slot_R, None] - 1).ravel(), device=device)
        self.place_R = torch.as_tensor(slot_R * self.k + sibling_R, device=device)
        row_GK = np.zeros(self.g * self.k, np.int64)  # a place without a live sibling repeats the first row
        row_GK[slot_R * self.k + sibling_R] = np.arange(len(slot_R))
        self.row_GK = torch.as_tensor(row_GK, device=device)
        hide_GP = np.where(np.arange(self.p)[None] < prompt_G[:, None], 0.0, -np.inf)
        hide_GT = np.where(np.arange(self.t)[None] < answer_G[:, None], 0.0, -np.inf)
        hide = torch.as_tensor(np.concatenate([hide_GP, hide_GT], 1), device=device, dtype=cache.prefix.dtype)
        self.hide_G11S = hide[:, None, None]

    def attend(self, layer: int, q_HSD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> Tensor:
        (heads, rows, width), h = q_HSD.shape, k_HSD.shape[0]
        g, k, rep = self.g, self.k, heads // h
        suffix, prefix = self.cache.suffix[layer], self.cache.prefix[layer, :, :g]
        for kept, new_HSD in zip(suffix, (k_HSD, v_HSD), strict=True):
            kept.view(-1, width).index_copy_(0, self.at_Rh, new_HSD.transpose(0, 1).reshape(-1, width))
        q = q_HSD.transpose(0, 1).reshape(rows, -1).index_select(0, self.row_GK) * scale
        q = q.view(g, k, h, rep, width).transpose(1, 2).contiguous()
        own_k, own_v = (s[:g, ..., : self.t, :] for s in suffix)  # [G, h, K, T, D]
        shared = q.view(g, h, k * rep, width) @ prefix[0, :, :, : self.p].transpose(-1, -2)
        own = (q @ own_k.transpose(-1, -2)).view(g, h, k * rep, -1)
        weight = torch.softmax(torch.cat([shared, own], -1) + self.hide_G11S, -1)
        out = weight[..., : self.p] @ prefix[1, :, :, : self.p]
        out = out.view(g, h, k, rep, width) + weight[..., self.p :].view(g, h, k, rep, -1) @ own_v
        return out.transpose(1, 2).reshape(g * k, -1).index_select(0, self.place_R).view(rows, heads, width)


class PrefixStore:
    """Keys and values of finished conversations, so that a later turn computes only its new tokens.

    Least recently used ones are dropped beyond `capacity` tokens. `owner` is the snapshot that computed them: the same
    tokens under another adapter are other keys and values.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.tokens = capacity, 0
        self._entries: OrderedDict[tuple[int, bytes], Tensor] = OrderedDict()

    def put(self, owner: int, ids: np.ndarray, kv_L2hTD: Tensor) -> None:
        key = (owner, ids.astype(np.int64).tobytes())
        if key in self._entries or len(ids) > self.capacity:
            return
        self._entries[key] = kv_L2hTD
        self.tokens += len(ids)
        while self.tokens > self.capacity:
            _, dropped = self._entries.popitem(last=False)
            self.tokens -= dropped.shape[-2]

    def longest(self, owner: int, ids: np.ndarray) -> Tensor | None:
        """Keys and values of the longest stored proper prefix of `ids`, or None."""
        raw = ids.astype(np.int64).tobytes()
        for length in sorted({kv.shape[-2] for kv in self._entries.values()}, reverse=True):
            key = (owner, raw[: 8 * length])
            if length < len(ids) and key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        return None

    def clear(self) -> None:
        self._entries.clear()
        self.tokens = 0
