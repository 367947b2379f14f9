"""Scripted answers of a model, in the three formats of the OpenAI API and in Anthropic's, streamed or not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_numbers = itertools.count(1)
_USAGE: dict[str, Any] = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 8},
}


class ToolUse(NamedTuple):
    """One tool call that the model asks for."""

    name: str
    arguments: Mapping[str, Any] = {}
    id: str | None = None
    """Id of the call; generated if not given."""


class Answer(NamedTuple):
    """Text, tool calls or both."""

    text: str = ""
    tools: tuple[ToolUse, ...] = ()

    @classmethod
    def of(cls, reply: str | ToolUse | Sequence[ToolUse] | Answer) -> Answer:
        """Return ``reply``, an entry of a script, as an ``Answer`` with an id for every tool call."""
        if isinstance(reply, str):
            return cls(reply)
        if isinstance(reply, ToolUse):
            reply = (reply,)
        elif not isinstance(reply, Answer):
            reply = tuple(reply)
        text, tools = (reply.text, reply.tools) if isinstance(reply, Answer) else ("", reply)
        return cls(text, tuple(use if use.id else use._replace(id=f"call_{next(_numbers)}") for use in tools))


def answer_body(kind: str, request: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """Return the body of a complete answer. ``kind`` is the path below ``/v1``."""
    model = request.get("model", "fake")
    if kind == "/responses":
        return _response(model, answer)
    if kind == "/messages":
        return _message(model, answer)
    if kind == "/messages/count_tokens":
        return {"input_tokens": 12}
    if kind == "/completions":
        choice: dict[str, Any] = {"index": 0, "text": answer.text, "finish_reason": "stop", "logprobs": None}
        name = "text_completion"
    else:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
        if answer.tools:
            message["tool_calls"] = [_chat_call(use) for use in answer.tools]
        choice = {"index": 0, "message": message, "finish_reason": _why(answer)}
        name = "chat.completion"
    return {
        "id": "fake-1",
        "object": name,
        "created": 1,
        "model": model,
        "choices": [choice],
        "usage": _USAGE,
    }


def answer_stream(kind: str, request: dict[str, Any], answer: Answer) -> Iterator[str]:
    """Yield the server-sent events of an answer, one per word and tool call. ``kind`` is the path below
    ``/v1``."""
    model = request.get("model", "fake")
    if kind == "/responses":
        yield from _events(_response_events(model, answer))
        return
    if kind == "/messages":
        yield from _events(_message_events(_message(model, answer)))
        return
    name = "text_completion" if kind == "/completions" else "chat.completion.chunk"
    head = {"id": "fake-1", "object": name, "created": 1, "model": model}
    for choice in _chunks(kind, answer):
        yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
    if (request.get("stream_options") or {}).get("include_usage"):
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': _USAGE})}\n\n"
    yield "data: [DONE]\n\n"


def _chunks(kind: str, answer: Answer) -> Iterator[dict[str, Any]]:
    words = answer.text.split(" ") if answer.text else []
    if kind == "/completions":
        for word in words:
            yield {"index": 0, "text": word + " ", "finish_reason": None, "logprobs": None}
        return
    for word in words:
        yield {"index": 0, "delta": {"role": "assistant", "content": word + " "}, "finish_reason": None}
    for index, use in enumerate(answer.tools):
        delta = {"role": "assistant", "tool_calls": [{"index": index, **_chat_call(use)}]}
        yield {"index": 0, "delta": delta, "finish_reason": None}
    yield {"index": 0, "delta": {"content": ""}, "finish_reason": _why(answer)}


def _why(answer: Answer) -> str:
    return "tool_calls" if answer.tools else "stop"


def _chat_call(use: ToolUse) -> dict[str, Any]:
    return {
        "id": use.id,
        "type": "function",
        "function": {"name": use.name, "arguments": json.dumps(use.arguments)},
    }


def _response(model: str, answer: Answer) -> dict[str, Any]:
    return {
        "id": "resp-1",
        "object": "response",
        "created_at": 1,
        "model": model,
        "status": "completed",
        "output": list(_items(answer)),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 12,
            "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 15,
        },
    }


def _items(answer: Answer) -> Iterator[dict[str, Any]]:
    if answer.text or not answer.tools:
        yield {
            "type": "message",
            "id": "msg-1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": answer.text, "annotations": []}],
        }
    for use in answer.tools:
        yield {
            "type": "function_call",
            "id": f"fc-{use.id}",
            "call_id": use.id,
            "name": use.name,
            "arguments": json.dumps(use.arguments),
            "status": "completed",
        }


def _events(parts: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    for number, (name, fields) in enumerate(parts):
        yield f"event: {name}\ndata: {json.dumps({'type': name, 'sequence_number': number, **fields})}\n\n"


def _response_events(model: str, answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    response = _response(model, answer)
    started = {**response, "output": [], "status": "in_progress", "usage": None}
    parts: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": started})]
    for index, item in enumerate(response["output"]):
        where: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        parts.append(("response.output_item.added", {"output_index": index, "item": item}))
        if item["type"] == "message":
            for word in answer.text.split(" "):
                delta = {"content_index": 0, "logprobs": [], "delta": word + " "}
                parts.append(("response.output_text.delta", {**where, **delta}))
        else:
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            parts.append(("response.function_call_arguments.done", {**where, **arguments}))
        parts.append(("response.output_item.done", {"output_index": index, "item": item}))
    parts.append(("response.completed", {"response": response}))
    return parts


def _message(model: str, answer: Answer) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.text}] if answer.text else []
    for use in answer.tools:
        content.append({"type": "tool_use", "id": use.id, "name": use.name, "input": dict(use.arguments)})
    return {
        "id": "msg-1",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "tool_use" if answer.tools else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 4, "cache_read_input_tokens": 8, "output_tokens": 3},
    }


def _message_events(message: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "message_start", {"message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message["content"]):
        where = {"index": index}
        if block["type"] == "text":
            yield "content_block_start", {**where, "content_block": {"type": "text", "text": ""}}
            deltas = [{"type": "text_delta", "text": word + " "} for word in block["text"].split(" ")]
        else:
            yield "content_block_start", {**where, "content_block": {**block, "input": {}}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        for delta in deltas:
            yield "content_block_delta", {**where, "delta": delta}
        yield "content_block_stop", where
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"delta": delta, "usage": message["usage"]}
    yield "message_stop", {}
