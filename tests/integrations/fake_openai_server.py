"""An OpenAI-compatible server that plays back answers, and a sojourn server that records events."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EVENTS = "/sojourn/v1/events"


def calls(*commands: str, content: str = "thinking") -> dict[str, Any]:
    """An answer with one bash call for each command."""
    return {"content": content, "commands": list(commands)}


class MiniServer:
    """Answers ``POST /v1/…`` with ``script``, one item per request, and records all requests and events."""

    def __init__(self, script: list[dict[str, Any]], *, sojourn: bool = True) -> None:
        self.script = script
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.events: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(200, {"name": "sojourn", "wire": [1]}) if sojourn else self._answer(404, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path == EVENTS:
                    if not sojourn:
                        return self._answer(404, {})
                    with owner.lock:
                        owner.events += body["events"]
                    return self._answer(
                        200, {"v": 1, "outcomes": [{"outcome": "applied"} for _ in body["events"]]}
                    )
                return self._answer(*owner.answer(self.path, body, dict(self.headers)))

            def _answer(self, status: int, document: dict[str, Any]) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self._thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> MiniServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self._thread.join()
        self.http.server_close()

    def answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            number = len(self.requests)
            self.requests.append((path, body, {name.lower(): value for name, value in headers.items()}))
            context = json.loads(body.get("vllm_xargs", {}).get("agentic_context", "{}"))
            self.events += context.get("sojourn", {}).get("events", [])
        if number >= len(self.script):
            return 400, {"error": {"message": f"no answer number {number}", "type": "x", "code": 400}}
        step = self.script[number]
        if "status" in step:
            return step["status"], {
                "error": {"message": "scripted failure", "type": "x", "code": step["status"]}
            }
        if path.endswith("/responses"):
            return 200, _response(number, body["model"], step)
        return 200, _completion(number, body["model"], step)

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
