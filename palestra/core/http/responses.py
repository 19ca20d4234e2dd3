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
CALL_FIELDS = ("type", "id", "call_id", "name", "arguments", "output", "status")
TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def to_chat_body(body: Any) -> Any:
    """Returns a request's JSON as that of chat completions; `parse_call` checks the fields with the same name. Raises
    ValueError for what chat completions have not."""
    if not isinstance(body, dict):
        return body
    if wrong := [key for key in CHAT_ONLY if body.get(key) is not None]:
        raise ValueError(f"{wrong[0]!r} is of chat completions: leave it out, or POST to /v1/chat/completions")
    if wrong := [key for key in STORED if body.get(key)]:
        raise ValueError(f"{wrong[0]!r} is not used here, where no response is stored: send all turns in input")
    chat = {key: value for key, value in body.items() if key not in DEFAULTS or value != DEFAULTS[key]}
    instructions, text = chat.pop("instructions", None), chat.pop("text", None)
    chat["messages"] = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(_items(chat.pop("input", None))):
        _add_item(chat["messages"], item, f"input.{i}")
    chat["max_completion_tokens"] = chat.pop("max_output_tokens", None)
    if text is not None:
        _check_object(text, ("format",), "text")
        chat["response_format"] = _nested(text.get("format"), "json_schema")
    chat["tool_choice"] = _nested(chat.get("tool_choice"), "function")
    if isinstance(chat.get("tools"), list):
        chat["tools"] = [_nested(tool, "function") for tool in chat["tools"]]
    return chat


def _items(given: Any) -> list[Any]:
    if isinstance(given, list) and given:
        return given
    if not isinstance(given, str):
        raise ValueError("input must be a text or a list of messages, calls and their outputs")
    return [{"role": "user", "content": given}]


def _check_object(part: Any, used: tuple[str, ...], where: str) -> None:
    if not isinstance(part, dict):
        raise ValueError(f"{where} is {str(part)[:64]!r}: send an object")
    check_part(part, used, where)


def _nested(part: Any, kind: str) -> Any:
    """Returns a flat object of type `kind` in the form of chat completions, whose fields are one level deeper."""
    if not isinstance(part, dict) or part.get("type") != kind:
        return part
    return {"type": kind, kind: {key: value for key, value in part.items() if key != "type"}}


def _add_item(messages: list[Json], item: Any, where: str) -> None:
    """Adds an item of the input to the messages: a call, and a text after a thought, belong to one answer."""
    kind = item.get("type", "message") if isinstance(item, dict) else item
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message":
        _check_object(item, ("type", "id", "status", "phase", "role", "content"), where)
        message = {"role": item.get("role"), "content": _text(item.get("content"), where)}
        if message["role"] == "assistant" and last and set(last) == {"role", "content", "reasoning_content"}:
            last["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "function_call_output":
        _check_object(item, CALL_FIELDS, where)
        output = _text(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "function_call":
        _check_object(item, CALL_FIELDS, where)
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        last.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind == "reasoning":
        _check_object(item, ("type", "id", "status", "content"), where)
        messages.append({"role": "assistant", "content": "", "reasoning_content": _text(item.get("content"), where)})
    else:
        raise ValueError(f"{where}: type {str(kind)[:64]!r} is not used here: send messages, calls and their outputs")


def _text(content: Any, where: str) -> Any:
    """Returns content as one text. Raises ValueError for parts that are none."""
    if not isinstance(content, list):
        return content
    for part in content:
        _check_object(part, ("type", "text"), f"{where}.content")
        if part.get("type") not in TEXT_TYPES or not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: messages of text only are answered here: send parts of type input_text")
    return "".join(part["text"] for part in content)


def build_response(number: int, asked: ChatCall, message: Json, reply: ChatReply, warning: str) -> Json:
    """Returns the response with an assistant's message."""
    calls = message.get("tool_calls", [])
    output: list[Json] = []
    if reply.thought:
        thought = [{"type": "reasoning_text", "text": reply.thought}]
        output.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": thought})
    is_cut = reply.hit_length_limit and not calls
    status = "incomplete" if is_cut else "completed"
    if message["content"] or not calls:
        parts = [{"type": "output_text", "text": message["content"], "annotations": []}]
        written = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": parts}
        output.append(written)
    for i, call in enumerate(calls):
        named = {"id": f"fc_{number}_{i}", "call_id": call["id"], **call["function"], "status": "completed"}
        output.append({"type": "function_call", **named})
    head = {"id": f"resp_{number}", "object": "response", "created_at": int(time.time()), "model": asked.model}
    tools = [{"type": "function", **tool.get("function", tool)} for tool in asked.chat.tools]
    head |= {"status": status, "error": None, "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None}
    head |= {
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "output": output,
        "usage": _usage(reply),
    }
    return head | ({"warning": warning} if warning else {})


def _usage(reply: ChatReply) -> Json:
    read, written = reply.token_counts or (0, 0)
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {"input_tokens": read, "output_tokens": written, "total_tokens": read + written, **details}


def response_stream(response: Json) -> str:
    """Returns a response as server-sent events, with each text in one piece."""
    events = enumerate(_events(response))
    return "".join(
        f"event: {event['type']}\ndata: {json.dumps(event | {'sequence_number': i})}\n\n" for i, event in events
    )


def _events(response: Json) -> Iterator[Json]:
    begun = response | {"status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    for i, item in enumerate(response["output"]):
        at = {"item_id": item["id"], "output_index": i}
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {"type": "response.output_item.added", "output_index": i, "item": item | empty}
        if item["type"] == "function_call":
            piece = "response.function_call_arguments"
            yield {"type": f"{piece}.delta", **at, "delta": item["arguments"]}
            yield {"type": f"{piece}.done", **at, "name": item["name"], "arguments": item["arguments"]}
        elif item["type"] == "message":
            (part,) = item["content"]
            at["content_index"] = 0
            yield {"type": "response.content_part.added", **at, "part": part | {"text": ""}}
            yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": i, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}
