"""OpenAI-compatible inference routes, so that other frameworks can use a trained agent.

`model` is a path of weights (tinker://...) or a base's name. A completion ends at the model's end token, or at a string
in `stop`, which is cut off. With `stream` it is sent in pieces after it is complete, since completions share their
batch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse

from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.service.server.answer_poller import AnswerPoller
from palestra.service.server.deps import ContextDep, JsonBody, OwnerDep, QueueDep, RequestQueue
from palestra.service.server.routes.sampling import (
    SamplerRef,
    check_answer_size,
    check_prompt,
    context_refusal,
    resolve_max_tokens,
    resolve_seed,
    resolve_source,
)
from palestra.service.server.state import ServiceContext
from palestra.service.wire import codec
from palestra.service.wire.jobs import SampleJob
from palestra.service.wire.schemas.openai import ChatCompletionRequest, CompletionParams, CompletionRequest
from palestra.service.wire.schemas.wire_model import BadRequest

router = APIRouter()
ANSWER_TIMEOUT_S = 600.0  # seconds that a call may wait for its answer
STREAM_PIECE_CHARS = 16  # characters of a streamed piece


@dataclass(frozen=True)
class Choice:
    """One completion: its text, and its tokens with their log-probabilities."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class CompletionResult:
    """All completions of a call, with token counts."""

    id: str
    model: str
    source: SamplerRef
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
def list_models(ctx: ContextDep, owner: OwnerDep) -> dict[str, Any]:
    """Lists the bases under all their names. Checkpoints for sampling are models too, but not listed."""
    names = [name for base in ctx.bases.values() for name in (base.name, *base.public_names)]
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "palestra"} for name in names]
    return {"object": "list", "data": data}


@router.post("/completions")
async def completions(
    call: JsonBody[CompletionRequest], request: Request, ctx: ContextDep, owner: OwnerDep, queue: QueueDep
) -> Response:
    """Answers `/completions`."""
    if call.echo:
        raise BadRequest("echo is not served here: the caller has the prompt already")
    _at_most_the_sampled(call.logprobs)
    source = await run_in_threadpool(_source, ctx, owner, call)
    prompts = await run_in_threadpool(_prompts, call.prompt, source)
    answer = await _answer(call, prompts, source, call.max_tokens, request, owner, queue)
    if call.stream:
        return _streamed(answer, "text_completion", lambda text: {"text": text})
    choices = [{"text": c.text, **_end(c), "logprobs": _tokens(c, source, call.logprobs)} for c in answer.choices]
    return JSONResponse({**answer.header_fields("text_completion"), "choices": choices, "usage": answer.usage})


@router.post("/chat/completions")
async def chat_completions(
    call: JsonBody[ChatCompletionRequest], request: Request, ctx: ContextDep, owner: OwnerDep, queue: QueueDep
) -> Response:
    """Answers `/chat/completions`. `tools` are passed to the base's chat template; tool calls are returned in the text
    of the answer."""
    _at_most_the_sampled(call.top_logprobs)
    source = await run_in_threadpool(_source, ctx, owner, call)
    prompt = await run_in_threadpool(_chat_prompt, call, source)
    limit = call.max_completion_tokens or call.max_tokens
    answer = await _answer(call, [prompt], source, limit, request, owner, queue)
    if call.stream:
        return _streamed(answer, "chat.completion.chunk", _delta)
    choices = [
        {"message": {"role": "assistant", "content": c.text}, **_end(c), "logprobs": _content(c, source, call.logprobs)}
        for c in answer.choices
    ]
    return JSONResponse({**answer.header_fields("chat.completion"), "choices": choices, "usage": answer.usage})


def _at_most_the_sampled(alternatives: int | None) -> None:
    if alternatives and alternatives > 1:
        raise BadRequest("log-probabilities are served of the sampled tokens only: ask for none beside them")


def _source(ctx: ServiceContext, owner: str, call: CompletionParams) -> SamplerRef:
    if call.model.startswith(("tinker://", "mint://")):
        return resolve_source(ctx, owner, call.model, None)
    return resolve_source(ctx, owner, None, call.model)


def _prompts(prompt: Any, source: SamplerRef) -> list[list[int]]:
    """Returns the token ids of each prompt, given as a text, several texts, token ids, or several lists of token ids.
    Raises BadRequest if a text is too long."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompt = [prompt]
    for one in prompt:
        if isinstance(one, str):
            _check_text(one, source)
    encode = source.base.tokenizer.encode
    return [encode(one, add_special_tokens=False) if isinstance(one, str) else list(one) for one in prompt]


def _check_text(text: str, source: SamplerRef) -> None:
    """Raises BadRequest if a text is too long however it is tokenized; tokenizing it may take seconds."""
    base = source.base
    if len(text) > base.max_length * base.max_chars_per_token:
        raise context_refusal(f"the prompt has {len(text)} characters", base, "cut it")


def _chat_prompt(call: ChatCompletionRequest, source: SamplerRef) -> list[int]:
    messages = [_plain(message.model_dump(exclude_none=True)) for message in call.messages]
    _check_text("".join(message["content"] for message in messages), source)
    try:
        text = source.base.tokenizer.apply_chat_template(
            messages, tools=call.tools, tokenize=False, add_generation_prompt=True
        )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        raise BadRequest(f"the chat template of {source.base.name} does not take these messages: {error}") from None
    _check_text(text, source)
    ids: list[int] = source.base.tokenizer.encode(text, add_special_tokens=False)
    return ids


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with its content as one string, since chat templates of text models read no parts. Raises
    BadRequest for parts that are not text."""
    parts = message.get("content") or ""
    if isinstance(parts, str):
        return {**message, "content": parts}
    if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
        raise BadRequest("messages of text only are served here: send parts of type text")
    return {**message, "content": "".join(part["text"] for part in parts)}


async def _answer(
    call: CompletionParams,
    prompts: list[list[int]],
    source: SamplerRef,
    limit: int | None,
    request: Request,
    owner: str,
    queue: RequestQueue,
) -> CompletionResult:
    """Samples for each prompt and waits for all results. Raises BadRequest if one fails or takes too long."""
    if not prompts:
        raise BadRequest("there is no prompt: send one")
    jobs = [_job(call, prompt, source, limit) for prompt in prompts]
    check_answer_size(jobs, queue.context.limits)
    ids = [await run_in_threadpool(queue.submit, owner, "sample", job) for job in jobs]
    waiter: AnswerPoller = request.app.state.waiter
    there = await asyncio.gather(*(waiter.wait([id], ANSWER_TIMEOUT_S) for id in ids))
    if not all(there):
        why = "the server is stopping" if waiter.is_closed else f"no answer within {ANSWER_TIMEOUT_S:.0f} seconds"
        raise BadRequest(f"{why}: send the request again", 503)
    results = [await run_in_threadpool(_result, queue.context, owner, id) for id in ids]
    sequences = [sequence for result in results for sequence in result["sequences"]]
    choices = [_choice(i, sequence, source, jobs[0].sampling.stop) for i, sequence in enumerate(sequences)]
    return CompletionResult(ids[0], call.model, source, choices, sum(len(prompt) for prompt in prompts))


def _job(call: CompletionParams, prompt: list[int], source: SamplerRef, limit: int | None) -> SampleJob:
    check_prompt(prompt, source.base)
    sampling = SamplingConfig(
        max_tokens=resolve_max_tokens(limit, len(prompt), source.base),
        temperature=1.0 if call.temperature is None else call.temperature,
        top_p=1.0 if call.top_p is None else call.top_p,
        stop=(call.stop,) if isinstance(call.stop, str) else tuple(call.stop or ()),
    )
    base, folder = source.base.name, source.folder
    seed, count = resolve_seed(call.seed), call.n or 1
    return SampleJob(base=base, folder=folder, tokens=prompt, num_samples=count, sampling=sampling, seed=seed)


def _result(ctx: ServiceContext, owner: str, id: str) -> dict[str, Any]:
    row = ctx.store.get_request(owner, id)
    assert row is not None
    if row.state == "failed":
        failure = json.loads(row.result)
        raise BadRequest(failure["error"], 400 if failure["category"] == "user" else 503)
    found: dict[str, Any] = json.loads(codec.sample_to_json(row.result))
    return found


def _choice(index: int, sequence: dict[str, Any], source: SamplerRef, stops: tuple[str, ...]) -> Choice:
    text = source.base.tokenizer.decode(sequence["tokens"], skip_special_tokens=True)
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    text = text[: min(ends)] if ends else text
    return Choice(index, text, sequence["tokens"], sequence["logprobs"], sequence["stop_reason"])


def _end(choice: Choice) -> dict[str, Any]:
    return {"index": choice.index, "finish_reason": choice.finish_reason}


def _tokens(choice: Choice, source: SamplerRef, wanted: int | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    texts = [source.base.tokenizer.decode([id]) for id in choice.token_ids]
    starts = list(itertools.accumulate((len(text) for text in texts[:-1]), initial=0))
    return {"tokens": texts, "token_logprobs": choice.logprobs, "top_logprobs": None, "text_offset": starts}


def _content(choice: Choice, source: SamplerRef, wanted: bool | None) -> dict[str, Any] | None:
    if not wanted:
        return None
    texts = [source.base.tokenizer.decode([id]) for id in choice.token_ids]
    pairs = zip(texts, choice.logprobs, strict=True)
    return {"content": [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]}


def _delta(text: str) -> dict[str, Any]:
    return {"delta": {"role": "assistant", "content": text} if text else {}}


def _streamed(answer: CompletionResult, kind: str, shown: Callable[[str], dict[str, Any]]) -> Response:
    """Returns the completions as server-sent events: pieces of text, then each finish reason, the usage, and [DONE]."""
    head = answer.header_fields(kind)

    def events() -> Iterator[dict[str, Any]]:
        for choice in answer.choices:
            for start in range(0, len(choice.text), STREAM_PIECE_CHARS):
                piece = shown(choice.text[start : start + STREAM_PIECE_CHARS])
                yield {**head, "choices": [{"index": choice.index, "finish_reason": None, **piece}]}
            yield {**head, "choices": [{**_end(choice), **shown("")}]}
        yield {**head, "choices": [], "usage": answer.usage}

    lines = (f"data: {json.dumps(event)}\n\n" for event in events())
    return StreamingResponse(itertools.chain(lines, ["data: [DONE]\n\n"]), media_type="text/event-stream")
