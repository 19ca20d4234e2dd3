"""Routes for samplers and sampling.

A completion ends at the model's end tokens and at the strings or ids in `stop`; with `stop` [] only its length ends it.
The token that ends it is part of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import APIRouter

from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.service.server.deps import JsonBody, OwnerDep
from palestra.service.server.owner import Owner
from palestra.service.server.routes.sessions import touch_session
from palestra.service.server.state import BaseInfo, ClientLimits
from palestra.service.storage.tables import checkpoints, samplers
from palestra.service.wire import codec
from palestra.service.wire.jobs import SampleJob
from palestra.service.wire.schemas import requests, responses
from palestra.service.wire.schemas.wire_model import BadRequest
from palestra.service.wire.validation import STABLE_REINFORCE

router = APIRouter()


class SamplerRef(NamedTuple):
    """Weights to sample from: a base, and a folder of the weight store (None: the bare base) that the client calls
    `path`."""

    base: BaseInfo
    folder: str | None
    path: str | None


def resolve_source(owner: Owner, model_path: str | None, base_model: str | None) -> SamplerRef:
    """Resolves a path of weights, a base name, or both. Raises BadRequest if they contradict each other or are
    unknown."""
    if model_path is None:
        return SamplerRef(owner.context.base(base_model), None, None)
    row = owner.checkpoint(model_path)
    if base_model is not None and owner.context.base(base_model).name != row.base:
        raise BadRequest(f"{model_path} is of base {row.base}, not {base_model}: leave base_model out")
    return SamplerRef(owner.context.base_of(row), row.folder, row.path)


@router.post("/create_sampling_session")
def create_sampling_session(
    call: JsonBody[requests.CreateSamplingSessionRequest], owner: OwnerDep
) -> responses.CreateSamplingSessionResponse:
    """Creates a sampler with the weights that are at the path now; later saves to the path do not change it."""
    source = resolve_source(owner, call.model_path, call.base_model)
    touch_session(owner, call.session_id)
    id = f"{call.session_id}:sample:{call.sampling_session_seq_id}"
    values = {"session": call.session_id, "owner": owner.name, "base": source.base.name, "path": source.path}
    if not owner.store.insert(samplers, id=id, folder=source.folder, created=time.time(), **values):
        there = owner.sampler(id)
        if (there.base, there.path) != (source.base.name, source.path):
            raise BadRequest(f"sampler {id} exists already, with other weights: take another sampling_session_seq_id")
    return responses.CreateSamplingSessionResponse(sampling_session_id=id)


@router.post("/join_sampling_session")
def join_sampling_session(
    call: JsonBody[requests.JoinSamplingSessionRequest], owner: OwnerDep
) -> responses.JoinSamplingSessionResponse:
    """Returns a number for a copy of a sampling client, from which its sequence numbers start; the first client has
    0."""
    owner.sampler(call.sampling_session_id)
    return responses.JoinSamplingSessionResponse(client_counter=1 + secrets.randbelow(10**9 - 1))


@router.get("/samplers/{id}")
def get_sampler(id: str, owner: OwnerDep) -> responses.GetSamplerResponse:
    """Returns the base and weights of a sampler."""
    row = owner.sampler(id)
    source = owner.store.get(checkpoints, row.path) if row.path else None
    name = owner.context.client_base_name(source) if source else owner.context.base_of(row).public_name
    return responses.GetSamplerResponse(sampler_id=id, base_model=name, model_path=row.path)


@router.post("/asample")
def asample(call: JsonBody[requests.SampleRequest], owner: OwnerDep) -> responses.UntypedAPIFuture:
    """Queues a sampling request."""
    if call.sampling_session_id is not None:
        row = owner.sampler(call.sampling_session_id)
        source = SamplerRef(owner.context.base_of(row), row.folder, row.path)
    else:
        source = resolve_source(owner, call.model_path, call.base_model)
    job = sample_job(call, source)
    sampler = call.sampling_session_id
    check_answer_size([job], owner.context.limits)
    key = f"sampler:{sampler}:{call.seq_id}" if sampler is not None and call.seq_id is not None else None
    id = owner.submit("sample", job, key=key, model=sampler, seq=call.seq_id)
    return responses.UntypedAPIFuture(request_id=id, sample_sequence_ids=[f"{id}-{i}" for i in range(call.num_samples)])


def sample_job(call: requests.SampleRequest, source: SamplerRef) -> SampleJob:
    """Converts the call to the worker's form, with a random seed if it has none. Raises BadRequest for options that are
    not supported or a prompt that does not fit."""
    if call.record_stability_info:
        raise BadRequest(f"record_stability_info is for training with it: {STABLE_REINFORCE}")
    tokens = codec.prompt_tokens(call.prompt).tolist()
    check_prompt(tokens, source.base)
    return SampleJob(
        base=source.base.name,
        folder=source.folder,
        tokens=tokens,
        num_samples=call.num_samples,
        sampling=_sampling(call.sampling_params, source.base, len(tokens)),
        seed=resolve_seed(call.sampling_params.seed),
        prompt_logprobs=bool(call.prompt_logprobs or call.topk_prompt_logprobs),
        topk_prompt=call.topk_prompt_logprobs,
        topk_sample=call.topk_sample_logprobs,
        target_prompt=_targets(call, len(tokens), source.base.vocab_size),
        drawn_prompt=call.prompt_alt_tokens_k,
        last_n=call.prompt_logprobs_last_n,
    )


def context_refusal(asked: str, base: BaseInfo, fix: str) -> BadRequest:
    """Returns the refusal of a request that is too long for the base. Clients recognise it by "context length"
    (text/policies/base.py), and end a trajectory there."""
    return BadRequest(f"{asked}, but {base.name} has a context length of {base.max_length}: {fix}")


def check_answer_size(jobs: Sequence[SampleJob], limits: ClientLimits) -> None:
    """Raises BadRequest if the answer to one call may exceed `limits.answer_tokens`."""
    size = sum(job.size for job in jobs)
    most = limits.answer_tokens
    if size > most:
        raise BadRequest(
            f"the answer may have {size} tokens (num_samples x max_tokens x (1 + topk), and those of a scored prompt), "
            f"more than {most}: lower max_tokens, num_samples or the top-k, or send several calls"
        )


def check_prompt(tokens: list[int], base: BaseInfo) -> None:
    """Raises BadRequest if the prompt is empty, has unknown ids, or leaves no position for a token."""
    if not tokens:
        raise BadRequest("the prompt is empty: send at least one token")
    if len(tokens) >= base.max_length:
        raise context_refusal(f"the prompt has {len(tokens)} tokens", base, "cut it")
    if max(tokens) >= base.vocab_size:
        raise BadRequest(
            f"the prompt has id {max(tokens)}, but ids of {base.name} go from 0 to {base.vocab_size - 1}: "
            "use the base's own tokenizer"
        )


def resolve_max_tokens(max_tokens: int | None, prompt: int, base: BaseInfo) -> int:
    """Returns the number of tokens to sample after `prompt` tokens: `max_tokens`, or as many as fit if it is None.
    Raises BadRequest if it exceeds the base's positions."""
    fit = base.max_length - prompt
    if max_tokens is not None and max_tokens > fit:
        asked = f"the prompt has {prompt} tokens and max_tokens is {max_tokens}"
        raise context_refusal(asked, base, f"lower max_tokens to {fit}, or leave it out")
    return fit if max_tokens is None else max_tokens


def resolve_seed(seed: int | None) -> int:
    """Returns the seed modulo 2**64, as the sampler uses it, or a random one for None."""
    return secrets.randbits(63) if seed is None else seed % 2**64


def _sampling(params: requests.SamplingParams, base: BaseInfo, prompt: int) -> SamplingConfig:
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return SamplingConfig(
        max_tokens=resolve_max_tokens(params.max_tokens, prompt, base),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop=tuple(stop for stop in stops if isinstance(stop, str)),
        stop_token_ids=tuple(stop for stop in stops if isinstance(stop, int)),
        stop_at_eos=params.stop != [],
    )


def _targets(call: requests.SampleRequest, prompt: int, vocab: int) -> list[list[int]] | None:
    """Returns the ids [P-1][K] whose log-probabilities are requested, with -1 for none. Raises BadRequest if their
    shape, dtype or range is wrong."""
    if call.target_prompt_logprobs is None:
        return None
    targets = codec.decode_array(call.target_prompt_logprobs, pad=-1)
    if targets.ndim != 2 or len(targets) != prompt - 1 or targets.dtype.kind != "i":
        raise BadRequest(
            f"target_prompt_logprobs has shape {list(targets.shape)} and dtype {targets.dtype}: send int64 "
            f"[{prompt - 1}, K], a row for each token of the prompt but the first"
        )
    if targets.size and not -1 <= targets.min() <= targets.max() < vocab:
        raise BadRequest(f"target_prompt_logprobs has ids outside 0 to {vocab - 1}; -1 asks for none")
    rows: list[list[int]] = targets.tolist()
    return rows
