"""OpenAI's Responses API: its requests as those of chat completions, and answers in its format.

No response is stored: a client sends the whole conversation as `input`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from palestra.core.chat import Json
from palestra.core.http.calls import ChatCall, ChatReply, check_part

CHAT_ONLY = ("messages", "response_format", "max_tokens", "max_completion_tokens")
STORED = ("previous_response_id", "conversation")
DEFAULTS = {"truncation": "disabled", "background": False}
CALL_FIELDS = ("type", "id", "call_id", "name", "arguments", "status")
OUTPUT_FIELDS = ("type", "id", "call_id", "output", "status")
TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text")


def to_chat_body(body: Any) -> Any:
    """Returns a request's JSON as that of chat completions. Fields of the same name are left to
    `parse_call`. Raises ValueError for what chat completions have not."""
    if not isinstance(body, dict):
        return body
    if wrong := [key for key in CHAT_ONLY if body.get(key) is not None]:
        raise ValueError(f"{wrong[0]!r} is of /v1/chat/completions: leave it out, or POST there")
    if wrong := [key for key in STORED if body.get(key)]:
        raise ValueError(f"{wrong[0]!r} is not used here: no response is stored, send all in input")
    chat = {key: value for key, value in body.items() if DEFAULTS.get(key, ...) != value}
    instructions = chat.pop("instructions", None)
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(_list_items(chat.pop("input", None))):
        _add_item(messages, item, f"input.{i}")
    if (text := chat.pop("text", None)) is not None:
        _check_object(text, ("format",), "text")
        chat["response_format"] = _nest_fields(text.get("format"), "json_schema")
    chat["tool_choice"] = _nest_fields(chat.get("tool_choice"), "function")
    if isinstance(chat.get("tools"), list):
        chat["tools"] = [_nest_fields(tool, "function") for tool in chat["tools"]]
    limit = chat.pop("max_output_tokens", None)
    return chat | {"messages": messages, "max_completion_tokens": limit}


def _list_items(given: Any) -> list[Any]:
    if isinstance(given, list) and given:
        return given
    if not isinstance(given, str):
        raise ValueError("input must be a text or a list of messages, calls and their outputs")
    return [{"role": "user", "content": given}]


def _check_object(part: Any, used: tuple[str, ...], where: str) -> None:
    if not isinstance(part, dict):
        raise ValueError(f"{where} is {str(part)[:64]!r}: send an object")
    check_part(part, used, where)


def _nest_fields(part: Any, kind: str) -> Any:
    """Returns an object of type `kind` as chat completions have it: its fields one level deeper."""
    if not isinstance(part, dict) or part.get("type") != kind:
        return part
    return {"type": kind, kind: {key: value for key, value in part.items() if key != "type"}}


def _add_item(messages: list[Json], item: Any, where: str) -> None:
    """Adds an item of the input to the messages. A call belongs to the answer before it, and a text
    to the thought before it."""
    kind = item.get("type", "message") if isinstance(item, dict) else item
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
    if kind == "message":
        _check_object(item, ("type", "id", "status", "phase", "role", "content"), where)
        content = _text(item.get("content"), where)
        is_thought = set(last) == {"role", "content", "reasoning_content"}
        if is_thought and item.get("role") == "assistant":
            last["content"] = content
        else:
            messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        _check_object(item, CALL_FIELDS, where)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not last:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        last.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        _check_object(item, OUTPUT_FIELDS, where)
        output = _text(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        _check_object(item, ("type", "id", "status", "content"), where)
        thought = _text(item.get("content"), where)
        messages.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        known = "send messages, calls and their outputs"
        raise ValueError(f"{where}: type {str(kind)[:64]!r} is not used here: {known}")


def _text(content: Any, where: str) -> Any:
    """Returns content as one text. Raises ValueError for parts that are none."""
    if not isinstance(content, list):
        return content
    for part in content:
        _check_object(part, ("type", "text"), f"{where}.content")
        if part.get("type") not in TEXT_TYPES or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: only texts are used here: send parts of type input_text")
    return "".join(part["text"] for part in content)


def build_response(number: int, asked: ChatCall, message: Json, reply: ChatReply) -> Json:
    """Returns the response with an assistant's message."""
    calls = message.get("tool_calls", [])
    is_cut = reply.hit_length_limit and not calls
    status = "incomplete" if is_cut else "completed"
    output: list[Json] = []
    if reply.thought:
        thought = [{"type": "reasoning_text", "text": reply.thought}]
        output.append({"type": "reasoning", "summary": [], "content": thought})
        output[0]["id"] = f"rs_{number}"
    if message["content"] or not calls:
        parts = [{"type": "output_text", "text": message["content"], "annotations": []}]
        said = {"type": "message", "role": "assistant", "status": status, "content": parts}
        output.append(said | {"id": f"msg_{number}"})
    for i, call in enumerate(calls):
        named = {"type": "function_call", "call_id": call["id"], **call["function"]}
        output.append(named | {"id": f"fc_{number}_{i}", "status": "completed"})
    warning = asked.form.check(message)
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": asked.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "tools": [{"type": "function", **tool.get("function", tool)} for tool in asked.chat.tools],
        "tool_choice": "auto",
        "parallel_tool_calls": not asked.form.is_single_call,
        "output": output,
        "usage": _usage(reply),
        **({"warning": warning} if warning else {}),
    }


def _usage(reply: ChatReply) -> Json:
    read, written = reply.token_counts or (0, 0)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }


def response_stream(response: Json) -> str:
    """Returns a response as server-sent events, with each text in one piece."""
    lines = []
    for i, event in enumerate(_events(response)):
        data = json.dumps(event | {"sequence_number": i})
        lines.append(f"event: {event['type']}\ndata: {data}\n\n")
    return "".join(lines)


def _events(response: Json) -> Iterator[Json]:
    begun = response | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    for i, item in enumerate(response["output"]):
        at = {"item_id": item["id"], "output_index": i}
        empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {"type": "response.output_item.added", "output_index": i, "item": item | empty}
        if item["type"] == "function_call":
            name = "response.function_call_arguments"
            written = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": f"{name}.delta", **at, "delta": item["arguments"]}
            yield {"type": f"{name}.done", **at, **written}
        elif item["type"] == "message":
            (part,) = item["content"]
            at |= {"content_index": 0}
            piece = {"delta": part["text"], "logprobs": []}
            whole = {"text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.added", **at, "part": part | {"text": ""}}
            yield {"type": "response.output_text.delta", **at, **piece}
            yield {"type": "response.output_text.done", **at, **whole}
            yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}
