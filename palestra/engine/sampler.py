"""Continuous batching: many groups, many adapters, one forward pass per token.

A request is one prompt and the number of answers wanted. Waiting requests are admitted whenever there is room, between
two decoding steps; a group leaves as soon as its last sibling ends. Each row draws from its own counter-based stream
(seed, sibling, position), so what is sampled does not depend on who shares the batch.

Shapes: `G` live groups, `K` siblings, `R` live rows, `T` answer positions, `V` vocabulary.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from palestra.config import Strict
from palestra.engine.cache import Cache, DecodeLayout, PrefillLayout, PrefixStore
from palestra.engine.lora import Snapshot, Stack, Stacked
from palestra.engine.models import Engine


class Sampling(Strict):
    """How a policy samples. `top_k` 0 and `top_p` 1 leave the distribution whole; temperature 0 is greedy."""

    max_tokens: int = Field(32, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """`n` answers to the prompt `prompt_ids` [P] under `adapter` (None: the bare base). `keep` remembers the answers'
    keys and values for a later turn that goes on from one of them."""

    prompt_ids: np.ndarray
    n: int
    sampling: Sampling
    adapter: Snapshot | None = None
    seed: int = 0
    keep: bool = False


@dataclass(frozen=True)
class Sampled:
    """`token_ids` [T] with the end token if there was one; `logprobs` [T] under the sampling temperature, before top-k
    and top-p cut the distribution (at temperature 0: of the plain softmax); `stop` is "stop" or "length"."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    stop: str


@dataclass
class Group:
    """A request being served. Arrays are [K, T] and [K]; `t` tokens are sampled so far."""

    request: Request
    future: asyncio.Future[list[Sampled]] | None
    tokens_KT: np.ndarray = field(init=False)
    logps_KT: np.ndarray = field(init=False)
    length_K: np.ndarray = field(init=False)
    stopped_K: np.ndarray = field(init=False)
    alive_K: np.ndarray = field(init=False)
    t: int = 0

    def __post_init__(self) -> None:
        shape = (self.request.n, self.request.sampling.max_tokens)
        self.tokens_KT, self.logps_KT = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        self.length_K, self.stopped_K = np.zeros(shape[0], np.int64), np.zeros(shape[0], bool)
        self.alive_K = np.ones(shape[0], bool)

    @property
    def prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def owner(self) -> int:
        return self.request.adapter.id if self.request.adapter else 0

    def result(self) -> list[Sampled]:
        return [
            Sampled(self.tokens_KT[k, :n], self.logps_KT[k, :n], "stop" if self.stopped_K[k] else "length")
            for k, n in enumerate(self.length_K)
        ]


class Sampler:
    """Serves requests on one engine. `await sample(request)` from any number of coroutines, or `sample_all` at once."""

    def __init__(self, engine: Engine, *, max_rows: int = 512, prefill_tokens: int = 8192, keep_tokens: int = 65536):
        config = engine.model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.engine, self.max_rows, self.prefill_tokens = engine, max_rows, prefill_tokens
        self.cache = Cache(config.num_hidden_layers, kv_heads, width, engine.device, engine.dtype)
        self.store = PrefixStore(keep_tokens)
        self.limit: int | None = getattr(config, "max_position_embeddings", None)
        self.end_ids = end_token_ids(engine)
        self.groups: list[Group] = []  # the group in slot i is groups[i]
        self.waiting: deque[Group] = deque()
        self._stacks: OrderedDict[tuple[int, ...], Stack] = OrderedDict()
        self._pump: asyncio.Task[None] | None = None
        self.counts = {"sampled_tokens": 0, "prefill_tokens": 0, "reused_tokens": 0}

    async def sample(self, request: Request) -> list[Sampled]:
        """The answers to `request`, in sibling order. Raises ValueError when the prompt and answer cannot fit."""
        group = Group(self._checked(request), asyncio.get_running_loop().create_future())
        self.waiting.append(group)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        assert group.future is not None
        return await group.future

    def sample_all(self, requests: list[Request]) -> list[list[Sampled]]:
        """The answers to all `requests`, sampled together."""
        groups = [Group(self._checked(request), None) for request in requests]
        self.waiting.extend(groups)
        while self.waiting or self.groups:
            self._advance()
        return [group.result() for group in groups]

    def forget(self) -> None:
        """Drops what was kept for later turns and for snapshots of earlier steps."""
        self.store.clear()
        self._stacks.clear()

    def _checked(self, request: Request) -> Request:
        need = len(request.prompt_ids) + request.sampling.max_tokens
        if not len(request.prompt_ids) or request.n < 1:
            raise ValueError("a request needs a prompt of at least one token and n of at least 1")
        if self.limit and need > self.limit:
            raise ValueError(
                f"a prompt of {len(request.prompt_ids)} tokens and {request.sampling.max_tokens} new ones exceed the "
                f"base's {self.limit} positions. Shorten the observation or lower sampling.max_tokens."
            )
        return request

    async def _run(self) -> None:
        try:
            while self.waiting or self.groups:
                await self._settle()
                self._advance()
        except Exception as error:
            # every coroutine that waits must hear of it, or it would wait for ever
            for group in [*self.groups, *self.waiting]:
                if group.future and not group.future.done():
                    group.future.set_exception(error)
            self.groups.clear()
            self.waiting.clear()

    async def _settle(self) -> None:
        """Lets every coroutine that can move do so, that its request joins the coming batch."""
        quiet, seen = 0, len(self.waiting)
        while quiet < 6:
            await asyncio.sleep(0)
            quiet, seen = (quiet + 1, seen) if len(self.waiting) == seen else (0, len(self.waiting))

    @torch.inference_mode()
    def _advance(self) -> None:
        """Admits what fits, then samples one token for each live row."""
        while self.waiting and (batch := self._admissible()):
            self._prefill(batch)
            self._retire()
        if self.groups:
            self._decode()
            self._retire()

    def _admissible(self) -> list[Group]:
        """The next waiting groups that fit beside the live rows, at most `prefill_tokens` of prompt at once."""
        rows, tokens = sum(g.request.n for g in self.groups), 0
        batch: list[Group] = []
        while self.waiting:
            group = self.waiting[0]
            crowded = rows + group.request.n > self.max_rows or tokens + group.prompt > self.prefill_tokens
            if crowded and (batch or self.groups):
                break
            rows, tokens = rows + group.request.n, tokens + group.prompt
            batch.append(self.waiting.popleft())
        return batch

    def _prefill(self, batch: list[Group]) -> None:
        batch.sort(key=_by_owner)
        first = len(self.groups)
        self.groups += batch
        if not first:  # sizes then depend only on what is live, and a resumed run computes in the same shapes
            self.cache.shrink(max(g.request.n for g in batch))
        self.cache.reserve(
            len(self.groups),
            max(g.request.n for g in batch),
            max(g.prompt for g in batch),
            max(g.request.sampling.max_tokens for g in batch),
        )
        starts = [self._reuse(first + i, group) for i, group in enumerate(batch)]
        lengths = np.array([g.prompt for g in batch])
        layout = PrefillLayout(self.cache, np.arange(first, len(self.groups)), np.array(starts), lengths)
        ids = np.concatenate([g.request.prompt_ids[s:] for g, s in zip(batch, starts, strict=True)])
        route = self._route([g.owner for g in batch], [g.prompt - s for g, s in zip(batch, starts, strict=True)], batch)
        logits_NV = self.engine.logits(self.engine.tensor(ids), layout.positions, layout, route, layout.last_N)
        self.counts["prefill_tokens"] += len(ids)
        rows = [(first + i, k) for i, g in enumerate(batch) for k in range(g.request.n)]
        of_row = [i for i, g in enumerate(batch) for _ in range(g.request.n)]
        self._draw(np.array(rows), logits_NV[self.engine.tensor(of_row)])

    def _reuse(self, slot: int, group: Group) -> int:
        """Writes the kept keys and values of the prompt's longest known prefix to `slot`; returns its length."""
        kept = self.store.longest(group.owner, group.request.prompt_ids)
        if kept is None:
            return 0
        length = kept.shape[-2]
        self.cache.prefix[:, :, slot, :, :length] = kept
        self.counts["reused_tokens"] += length
        return length

    def _decode(self) -> None:
        rows = [(s, k) for s in sorted(range(len(self.groups)), key=self._owner_of) for k in self._alive(s)]
        slot_R, sibling_R = np.array(rows).T
        prompt_G = np.array([g.prompt for g in self.groups])
        answer_G = np.array([g.t for g in self.groups])
        layout = DecodeLayout(self.cache, slot_R, sibling_R, prompt_G, answer_G)
        ids = [self.groups[s].tokens_KT[k, self.groups[s].t - 1] for s, k in rows]
        positions = self.engine.tensor(prompt_G[slot_R] + answer_G[slot_R] - 1)
        groups = [self.groups[s] for s, _ in rows]
        route = self._route([g.owner for g in groups], [1] * len(rows), groups)
        logits_RV = self.engine.logits(
            self.engine.tensor(ids), positions, layout, route, self.engine.tensor(range(len(rows)))
        )
        self._draw(np.array(rows), logits_RV)

    def _owner_of(self, slot: int) -> tuple[bool, str, int]:
        return _by_owner(self.groups[slot])

    def _alive(self, slot: int) -> list[int]:
        return np.flatnonzero(self.groups[slot].alive_K).tolist()

    def _route(self, owners: list[int], tokens: list[int], groups: list[Group]) -> Stacked | None:
        """The route for rows sorted by owner, the bare base last."""
        counts: OrderedDict[int, int] = OrderedDict()
        snapshots = {g.owner: g.request.adapter for g in groups if g.request.adapter}
        for owner, count in zip(owners, tokens, strict=True):
            if owner:
                counts[owner] = counts.get(owner, 0) + count
        if not counts:
            return None
        key = tuple(counts)
        if key not in self._stacks:
            self._stacks[key] = Stack([snapshots[owner] for owner in key], self.engine.linears)
            while len(self._stacks) > 8:
                self._stacks.popitem(last=False)
        self._stacks.move_to_end(key)
        return Stacked(self._stacks[key], list(counts.values()))

    def _draw(self, rows_R2: np.ndarray, logits_RV: Tensor) -> None:
        """Samples the next token of each row and notes which rows end with it."""
        groups = [self.groups[s] for s, _ in rows_R2]
        settings = [g.request.sampling for g in groups]
        seeds = np.array([g.request.seed for g in groups], np.uint64)
        steps = np.array([g.t for g in groups], np.uint64)
        u_R = uniform(seeds, rows_R2[:, 1].astype(np.uint64), steps)
        tokens, logps = choose(logits_RV, settings, u_R)
        ends = np.isin(tokens, self.end_ids)
        for (_slot, k), group, token, logp, end in zip(rows_R2, groups, tokens, logps, ends, strict=True):
            t = group.t
            group.tokens_KT[k, t], group.logps_KT[k, t], group.length_K[k] = token, logp, t + 1
            if end or (group.request.sampling.stop and self._hits_stop(group, k)):
                group.stopped_K[k], group.alive_K[k] = True, False
            elif t + 1 == group.request.sampling.max_tokens:
                group.alive_K[k] = False
        self.counts["sampled_tokens"] += len(rows_R2)
        for group in {id(g): g for g in groups}.values():
            group.t += 1

    def _hits_stop(self, group: Group, k: int) -> bool:
        text = self.engine.tokenizer.decode(group.tokens_KT[k, : group.length_K[k]], skip_special_tokens=True)
        return any(stop in text for stop in group.request.sampling.stop)

    def _retire(self) -> None:
        """Hands out finished groups and closes the gaps that they leave."""
        for slot in range(len(self.groups) - 1, -1, -1):
            group = self.groups[slot]
            if group.alive_K.any():
                continue
            if group.request.keep:
                self._keep(slot, group)
            last = self.groups.pop()
            if last is not group:
                self.groups[slot] = last
                self.cache.move(len(self.groups), slot, last.prompt, last.t)
            if group.future and not group.future.done():
                group.future.set_result(group.result())

    def _keep(self, slot: int, group: Group) -> None:
        for k, length in enumerate(group.length_K):
            # the last token sampled was never fed, so it has no keys and values
            ids = np.concatenate([group.request.prompt_ids, group.tokens_KT[k, : length - 1]])
            self.store.put(group.owner, ids, self.cache.row(slot, k, group.prompt, int(length) - 1))


def _by_owner(group: Group) -> tuple[bool, str, int]:
    adapter = group.request.adapter
    return (adapter is None, adapter.name if adapter else "", group.owner)


def end_token_ids(engine: Engine) -> np.ndarray:
    """The tokens that end an answer: the tokenizer's and the generation config's."""
    ends = {engine.tokenizer.eos_token_id}
    config = engine.model.generation_config.eos_token_id if engine.model.generation_config else None
    ends |= set(config if isinstance(config, list) else [config])
    return np.array(sorted(e for e in ends if e is not None), np.int64)


def uniform(seeds_R: np.ndarray, siblings_R: np.ndarray, steps_R: np.ndarray) -> np.ndarray:
    """Uniform numbers [R] in [0, 1), a pure function of (seed, sibling, step): two rounds of splitmix64 (Steele et al.,
    2014)."""
    with np.errstate(over="ignore"):
        x = _mix(seeds_R + np.uint64(0x9E3779B97F4A7C15) * (siblings_R + np.uint64(1)))
        x = _mix(x + np.uint64(0x9E3779B97F4A7C15) * (steps_R + np.uint64(1)))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choose(logits_RV: Tensor, settings: list[Sampling], u_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [R] drawn by inverse CDF at `u_R`, and their log-probabilities [R] before top-k and top-p."""
    temperature = torch.tensor([s.temperature or 1.0 for s in settings], device=logits_RV.device)
    logp_RV = torch.log_softmax(logits_RV.float() / temperature[:, None], -1)
    cdf_RV = _restrict(logp_RV, settings).double().exp().cumsum(-1)  # double: u close to 1 stays below the total
    target_R1 = torch.as_tensor(u_R, device=cdf_RV.device, dtype=cdf_RV.dtype)[:, None] * cdf_RV[:, -1:]
    tokens_R = torch.searchsorted(cdf_RV, target_R1, right=True)[:, 0].clamp_(max=logp_RV.shape[1] - 1)
    greedy = [i for i, s in enumerate(settings) if s.temperature == 0]
    if greedy:
        tokens_R[greedy] = logp_RV[greedy].argmax(-1)
    return tokens_R.cpu().numpy(), logp_RV.gather(1, tokens_R[:, None])[:, 0].cpu().numpy()


def _restrict(logp_RV: Tensor, settings: list[Sampling]) -> Tensor:
    """`logp_RV` with what top-k and top-p cut away at minus infinity (Holtzman et al., 2020)."""
    if all(s.top_k == 0 and s.top_p == 1 for s in settings):
        return logp_RV
    vocabulary = logp_RV.shape[1]
    sorted_RV, order_RV = logp_RV.sort(-1, descending=True)
    rank = torch.arange(vocabulary, device=logp_RV.device)
    top_k = torch.tensor([s.top_k or vocabulary for s in settings], device=logp_RV.device)
    top_p = torch.tensor([s.top_p for s in settings], device=logp_RV.device)
    before_RV = sorted_RV.exp().cumsum(-1) - sorted_RV.exp()
    cut = (rank >= top_k[:, None]) | (before_RV >= top_p[:, None])
    return logp_RV.scatter(1, order_RV, sorted_RV.masked_fill(cut, -torch.inf))
