"""OpenAI-compatible inference routes, so that other frameworks can use a trained agent.

`model` is a path of weights (tinker://...) or a base's name. Conversations are rendered, and answers parted into
thought, text and calls, as in training. An answer that has not the form that the call asks for becomes OpenAI's
`refusal` with the reason (core/http/answer_form.py). A completion ends at the model's end token, or at a string in
`stop`, which is cut off. With `stream` it is sent in pieces after it is complete, since completions share their batch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from palestra.core.chat import Chat, Json, thought_of, with_reasoning
from palestra.core.http.answer_form import AnswerForm
from palestra.core.http.calls import assistant_message, wants_stream_usage
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.token_sampling import REPLACEMENT_CHAR, SamplingConfig
from palestra.service.server.answer_poller import AnswerPoller
from palestra.service.server.deps import JsonBody, OwnerDep
from palestra.service.server.owner import Owner
from palestra.service.server.routes import sampling
from palestra.service.wire import codec
from palestra.service.wire.jobs import SampleJob
from palestra.service.wire.schemas.openai import ChatCompletionRequest, CompletionParams, CompletionRequest
from palestra.service.wire.schemas.wire_model import BadRequest

router = APIRouter()
ANSWER_TIMEOUT_S = 600.0  # seconds that a call may wait for its answer
MAX_OPTION_CHARS = 4096  # characters of the options of a chat template
STREAM_PIECE_CHARS = 16  # characters of a streamed piece
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SHOWN_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN_BYTES = [byte for byte in range(256) if byte not in _SHOWN_BYTES]
BYTE_OF_CHAR = {chr(byte): byte for byte in _SHOWN_BYTES} | {chr(256 + i): b for i, b in enumerate(_HIDDEN_BYTES)}
"""Bytes by the characters that stand for them in the tokens of byte-level BPE."""


@dataclass(frozen=True)
class Choice:
    """One completion: its text, in a chat its `message`, and its tokens with their log-probabilities. `alternatives`
    are the likeliest tokens at each place, if they were asked for."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    alternatives: Sequence[Sequence[tuple[int, float]] | None] | None = None
    message: Json = field(default_factory=dict)


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, the form that its answers must have, what encodes it and reads its answers, and its token ids."""

    chat: Chat
    form: AnswerForm
    encoder: ChatEncoder
    token_ids: list[int]


@dataclass(frozen=True)
class CompletionResult:
    """All completions of a call, with token counts."""

    id: str
    model: str
    choices: list[Choice]
    prompt_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """Token counts in OpenAI's format."""
        sampled = sum(len(choice.token_ids) for choice in self.choices)
        total = self.prompt_tokens + sampled
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": sampled, "total_tokens": total}

    def header_fields(self, kind: str) -> dict[str, Any]:
        """Returns the fields common to all response objects; `kind` is the object type."""
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}


@router.get("/models")
def list_models(owner: OwnerDep) -> dict[str, Any]:
    """Lists the bases under all their names. Checkpoints for sampling are models too, but not listed."""
    names = list(chain.from_iterable((base.name, *base.public_names) for base in owner.context.bases.values()))
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "palestra"} for name in names]
    return {"object": "list", "data": data}


@router.post("/completions")
async def completions(call: JsonBody[CompletionRequest], request: Request, owner: OwnerDep) -> Response:
    """Answers `/completions`."""
    if call.echo:
        raise BadRequest("echo is not served here: the caller has the prompt already")
    _refuse_streamed_logprobs(call, call.logprobs)
    source = await run_in_threadpool(_source, owner, call)
    prompts = await run_in_threadpool(_prompts, call, source)
    answer = await _answer(call, prompts, source, call.max_tokens, call.logprobs or 0, request, owner)
    if call.stream:
        return _stream(answer, "text_completion", _text_pieces, call)
    choices = [{"text": c.text, **_end(c), "logprobs": _tokens(c, source, call.logprobs)} for c in answer.choices]
    return JSONResponse({**answer.header_fields("text_completion"), "choices": choices, "usage": answer.usage})


@router.post("/chat/completions")
async def chat_completions(call: JsonBody[ChatCompletionRequest], request: Request, owner: OwnerDep) -> Response:
    """Answers `/chat/completions`."""
    _refuse_streamed_logprobs(call, call.logprobs)
    source = await run_in_threadpool(_source, owner, call)
    prompt = await run_in_threadpool(_chat_prompt, call, source)
    limit = call.max_completion_tokens or call.max_tokens
    sampled = await _answer(call, [prompt.token_ids], source, limit, call.top_logprobs or 0, request, owner)
    answer = await run_in_threadpool(_read, sampled, prompt, call.stops)
    if call.stream:
        return _stream(answer, "chat.completion.chunk", _chat_pieces, call)
    choices = [
        {"message": c.message, **_end(c), "logprobs": _content(c, source, call.logprobs)} for c in answer.choices
    ]
    return JSONResponse({**answer.header_fields("chat.completion"), "choices": choices, "usage": answer.usage})


def _refuse_streamed_logprobs(call: CompletionParams, wanted: int | None) -> None:
    if call.stream and wanted is not None and wanted is not False:
        raise BadRequest("logprobs are not streamed: leave out logprobs or stream")


def _source(owner: Owner, call: CompletionParams) -> sampling.SamplerRef:
    if call.model.startswith(("tinker://", "mint://")):
        return sampling.resolve_source(owner, call.model, None)
    return sampling.resolve_source(owner, None, call.model)


def _prompts(call: CompletionRequest, source: sampling.SamplerRef) -> list[list[int]]:
    """Returns the token ids of each prompt, given as a text, several texts, token ids, or several lists of token ids. A
    text begins with what the tokenizer puts before it, unless `add_special_tokens` is false. Raises BadRequest if a
    text is too long."""
    prompt: Any = call.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    for one in prompt:
        if isinstance(one, str):
            _check_text(one, source)
    encoder = _encoder(source.base.tokenizer, "{}")
    encode = encoder.encode_text if call.add_special_tokens is False else encoder.encode_raw
    return [encode(one).tolist() if isinstance(one, str) else list(one) for one in prompt]


@lru_cache(maxsize=64)
def _encoder(tokenizer: Any, options: str) -> ChatEncoder:
    """Returns the encoder of a base with options of its chat template (JSON)."""
    return ChatEncoder(tokenizer, json.loads(options), cache_size=0)


def _check_text(text: str, source: sampling.SamplerRef) -> None:
    """Raises BadRequest if a text is too long however it is tokenized; tokenizing it may take seconds."""
    base = source.base
    if len(text) > base.max_length * base.max_chars_per_token:
        raise sampling.context_refusal(f"the prompt has {len(text)} characters", base, "cut it")


def _chat_prompt(call: ChatCompletionRequest, source: sampling.SamplerRef) -> ChatPrompt:
    """Returns the prompt of a conversation. Raises BadRequest if it is too long, the chat template does not take it, or
    its answers cannot have the form that is asked for."""
    tokenizer = source.base.tokenizer
    chat = call.chat
    options = call.template_options
    _check_text("".join([str(chat), json.dumps(chat.tools), *map(thought_of, chat.messages)]), source)
    for key in options:
        _check_option(key, source)
    written = json.dumps(options, sort_keys=True)
    if len(written) > MAX_OPTION_CHARS:
        raise BadRequest(f"chat_template_kwargs may have {MAX_OPTION_CHARS} characters: put texts into messages")
    encoder = _encoder(tokenizer, written)
    try:
        form = call.parse_form()
    except ValueError as error:
        raise BadRequest(str(error)) from None
    try:
        ids = encoder.encode_conversation(chat).tolist()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{source.base.name} cannot be shown this conversation: {error}") from None
    return ChatPrompt(chat, form, encoder, ids)


def _check_option(key: str, source: sampling.SamplerRef) -> None:
    """Raises BadRequest for an option that the chat template does not read, or that is not the client's to set."""
    tokenizer = source.base.tokenizer
    given = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    if key in given or not re.search(rf"\b{re.escape(key)}\b", str(tokenizer.chat_template or "")):
        raise BadRequest(f"the chat template of {source.base.name} has no option {key[:64]!r}: leave it out")


async def _answer(
    call: CompletionParams,
    prompts: list[list[int]],
    source: sampling.SamplerRef,
    limit: int | None,
    alternatives: int,
    request: Request,
    owner: Owner,
) -> CompletionResult:
    """Samples for each prompt and waits for all results; `alternatives` tokens are scored at each place. Raises
    BadRequest if one fails or takes too long."""
    if not prompts:
        raise BadRequest("there is no prompt: send one")
    jobs = [_job(call, prompt, source, limit, alternatives) for prompt in prompts]
    sampling.check_answer_size(jobs, owner.context.limits)
    ids = [await run_in_threadpool(owner.submit, "sample", job) for job in jobs]
    waiter: AnswerPoller = request.app.state.waiter
    there = await asyncio.gather(*(waiter.wait([id], ANSWER_TIMEOUT_S) for id in ids))
    if not all(there):
        why = "the server is stopping" if waiter.is_closed else f"no answer within {ANSWER_TIMEOUT_S:.0f} seconds"
        raise BadRequest(f"{why}: send the request again", 503)
    results = [await run_in_threadpool(_result, owner, id) for id in ids]
    sequences = list(chain.from_iterable(result["sequences"] for result in results))
    choices = [_choice(i, sequence, source, call.stops) for i, sequence in enumerate(sequences)]
    return CompletionResult(ids[0], call.model, choices, sum(len(prompt) for prompt in prompts))


def _job(
    call: CompletionParams, prompt: list[int], source: sampling.SamplerRef, limit: int | None, alternatives: int
) -> SampleJob:
    sampling.check_prompt(prompt, source.base)
    settings = SamplingConfig(
        max_tokens=sampling.resolve_max_tokens(limit, len(prompt), source.base),
        temperature=1.0 if call.temperature is None else call.temperature,
        top_p=1.0 if call.top_p is None else call.top_p,
        top_k=max(call.top_k or 0, 0),
        stop=call.stops,
        stop_token_ids=tuple(call.stop_token_ids or ()),
        stop_at_eos=not call.ignore_eos,
    )
    return SampleJob(
        base=source.base.name,
        folder=source.folder,
        tokens=prompt,
        num_samples=call.n or 1,
        sampling=settings,
        seed=sampling.resolve_seed(call.seed),
        topk_sample=alternatives,
    )


def _result(owner: Owner, id: str) -> dict[str, Any]:
    row = owner.store.get_request(owner.name, id)
    assert row is not None
    if row.state == "failed":
        failure = json.loads(row.result)
        raise BadRequest(failure["error"], 400 if failure["category"] == "user" else 503)
    found: dict[str, Any] = json.loads(codec.sample_to_json(row.result))
    return found


def _choice(index: int, sequence: dict[str, Any], source: sampling.SamplerRef, stops: tuple[str, ...]) -> Choice:
    text = source.base.tokenizer.decode(sequence["tokens"], skip_special_tokens=True)
    sampled = (sequence["tokens"], sequence["logprobs"], sequence["stop_reason"])
    return Choice(index, _cut(text, stops), *sampled, sequence.get("topk_logprobs"))


def _cut(text: str, stops: tuple[str, ...]) -> str:
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _read(answer: CompletionResult, prompt: ChatPrompt, stops: tuple[str, ...]) -> CompletionResult:
    """Returns the completions of a chat with their messages: text, thought and calls, or a refusal in the place of an
    answer that has not the form that is asked for."""
    answers = len(answer.choices)
    return replace(answer, choices=[_with_message(choice, prompt, stops, answers) for choice in answer.choices])


def _with_message(choice: Choice, prompt: ChatPrompt, stops: tuple[str, ...], answers: int) -> Choice:
    ids = np.array(choice.token_ids, np.int32)
    prompt_ids = np.array(prompt.token_ids, np.int32)
    read = prompt.encoder.read(ids, prompt_ids, prompt.chat.tools)
    thought = _cut(read.thought, stops)
    message = assistant_message(_cut(read.text, stops), thought, prompt.chat)
    if refusal := prompt.form.check(message, answers):
        message = with_reasoning({"role": "assistant", "content": None, "refusal": refusal}, thought)
    finish_reason = "tool_calls" if "tool_calls" in message else choice.finish_reason
    return replace(choice, message=message, finish_reason=finish_reason)


def _end(choice: Choice) -> dict[str, Any]:
    return {"index": choice.index, "finish_reason": choice.finish_reason}


def _tokens(choice: Choice, source: sampling.SamplerRef, wanted: int | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    decode = source.base.tokenizer.decode
    texts = [decode([id]) for id in choice.token_ids]
    starts = list(accumulate((len(text) for text in texts[:-1]), initial=0))
    best = [{decode([id]): logp for id, logp in row or ()} for row in choice.alternatives or ()] or None
    return {"tokens": texts, "token_logprobs": choice.logprobs, "top_logprobs": best, "text_offset": starts}


def _content(choice: Choice, source: sampling.SamplerRef, wanted: bool | None) -> dict[str, Any] | None:
    if not wanted:
        return None
    tokenizer = source.base.tokenizer
    rows = choice.alternatives or [None] * len(choice.token_ids)
    found = zip(choice.token_ids, choice.logprobs, rows, strict=True)
    return {
        "content": [
            _score(tokenizer, id, logp) | {"top_logprobs": [_score(tokenizer, *best) for best in row or ()]}
            for id, logp, row in found
        ]
    }


def _score(tokenizer: Any, id: int, logprob: float) -> dict[str, Any]:
    return {"token": tokenizer.decode([id]), "logprob": logprob, "bytes": list(token_bytes(tokenizer, id))}


def token_bytes(tokenizer: Any, id: int) -> bytes:
    """Returns the bytes of a token, which may be a part of a character."""
    text = str(tokenizer.decode([id]))
    if REPLACEMENT_CHAR not in text:
        return text.encode()
    piece = str(tokenizer.convert_ids_to_tokens(id))
    if found := BYTE_TOKEN.fullmatch(piece):
        return bytes.fromhex(found[1])
    is_byte_level = all(char in BYTE_OF_CHAR for char in piece)
    return bytes(BYTE_OF_CHAR[char] for char in piece) if is_byte_level else text.encode()


def _text_pieces(choice: Choice) -> Iterator[dict[str, Any]]:
    yield from ({"text": piece} for piece in _pieces(choice.text))
    yield {"text": ""}


def _chat_pieces(choice: Choice) -> Iterator[dict[str, Any]]:
    message = choice.message
    yield {"delta": {"role": "assistant", "content": ""}}
    for key in ("reasoning_content", "content", "refusal"):
        yield from ({"delta": {key: piece}} for piece in _pieces(message.get(key) or ""))
    for i, each in enumerate(message.get("tool_calls", ())):
        yield {"delta": {"tool_calls": [{"index": i, **each}]}}
    yield {"delta": {}}


def _pieces(text: str) -> Iterator[str]:
    return (text[start : start + STREAM_PIECE_CHARS] for start in range(0, len(text), STREAM_PIECE_CHARS))


def _stream(
    answer: CompletionResult, kind: str, pieces: Callable[[Choice], Iterator[dict[str, Any]]], call: CompletionParams
) -> Response:
    """Returns the completions as server-sent events: the pieces of each, the last with its finish reason, the usage if
    it was asked for, and [DONE]."""
    head = answer.header_fields(kind)

    def events() -> Iterator[dict[str, Any]]:
        for choice in answer.choices:
            *first, last = pieces(choice)
            for piece in first:
                yield {**head, "choices": [{"index": choice.index, "finish_reason": None, **piece}]}
            yield {**head, "choices": [{**_end(choice), **last}]}
        if wants_stream_usage(call.stream_options):
            yield {**head, "choices": [], "usage": answer.usage}

    lines = (f"data: {json.dumps(event)}\n\n" for event in events())
    return StreamingResponse(chain(lines, ["data: [DONE]\n\n"]), media_type="text/event-stream")
