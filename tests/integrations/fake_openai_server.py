"""An OpenAI-compatible server that plays back answers, and a sojourn server that records events."""

from __future__ import annotations

import json
import threading
from typing import Any

from json_handler import HandlerServer, JsonHandler

EVENTS = "/sojourn/v1/events"


def calls(*commands: str, content: str = "thinking") -> dict[str, Any]:
    """An answer with one bash call for each command."""
    return {"content": content, "commands": list(commands)}


class MiniServer(HandlerServer):
    """Answers ``POST /v1/…`` with ``script``, one item per request, and records all requests and events."""

    def __init__(self, script: list[dict[str, Any]], *, sojourn: bool = True) -> None:
        self.script = script
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.events: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        owner = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.answer(*(({"name": "sojourn", "wire": [1]}, 200) if sojourn else ({}, 404)))

            def do_POST(self) -> None:
                body = self.read_json()
                if self.path != EVENTS:
                    self.answer(*owner.answer(self.path, body, dict(self.headers)))
                elif not sojourn:
                    self.answer({}, 404)
                else:
                    with owner.lock:
                        owner.events += body["events"]
                    self.answer({"v": 1, "outcomes": [{"outcome": "applied"} for _ in body["events"]]})

        super().__init__(Handler)

    def answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[dict[str, Any], int]:
        with self.lock:
            number = len(self.requests)
            self.requests.append((path, body, {name.lower(): value for name, value in headers.items()}))
            context = json.loads(body.get("vllm_xargs", {}).get("agentic_context", "{}"))
            self.events += context.get("sojourn", {}).get("events", [])
        if number >= len(self.script):
            return {"error": {"message": f"no answer number {number}", "type": "x", "code": 400}}, 400
        step = self.script[number]
        if "status" in step:
            error = {"message": "scripted failure", "type": "x", "code": step["status"]}
            return {"error": error}, step["status"]
        if path.endswith("/responses"):
            return _response(number, body["model"], step), 200
        return _completion(number, body["model"], step), 200

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, sorted by program id and sequence number, without duplicates."""
        with self.lock:
            unique = {(e["program_id"], e["seq"]): e for e in self.events if e["type"] == kind}
        return [unique[key] for key in sorted(unique)]


def _completion(number: int, model: str, step: dict[str, Any]) -> dict[str, Any]:
    tool_calls = [
        {
            "id": f"call-{number}-{index}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": command})},
        }
        for index, command in enumerate(step.get("commands", ()))
    ]
    message = {
        "role": "assistant",
        "content": step["content"],
        **({"tool_calls": tool_calls} if tool_calls else {}),
    }
    reason = "tool_calls" if tool_calls else "stop"
    return {
        "id": f"c-{number}",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }


def _response(number: int, model: str, step: dict[str, Any]) -> dict[str, Any]:
    output = [
        {
            "type": "function_call",
            "id": f"f-{number}-{index}",
            "call_id": f"call-{number}-{index}",
            "name": "bash",
            "arguments": json.dumps({"command": command}),
            "status": "completed",
        }
        for index, command in enumerate(step.get("commands", ()))
    ]
    return {
        "id": f"r-{number}",
        "object": "response",
        "created_at": 1,
        "model": model,
        "status": "completed",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15},
    }
