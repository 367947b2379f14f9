"""A server that answers with the forced tokens and has an engine's counters. A token is a byte."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

from json_handler import HandlerServer, JsonHandler
from sojourn_server.demo.demo_tasks import ScriptedTurn
from sojourn_server.demo.scripted_tokens import tool_call
from sojourn_server.models.chat_format import END_OF_MESSAGE, assistant_text

OURS = b'{"name": "sojourn", "wire": [1]}'


class ByteTokenizer:
    """A tokenizer whose tokens are bytes."""

    def forced_ids(self, turn: ScriptedTurn) -> list[int]:
        return list((assistant_text(turn.thought, [tool_call(turn)]) + END_OF_MESSAGE).encode())


class EchoEngine(HandlerServer):
    """``garble`` gets the number and command of a forced request, and returns the command of the answer.

    With an ``api_key``, every request except ``/health`` needs it.
    """

    def __init__(
        self,
        garble: Any = lambda number, command: command,
        *,
        capabilities: bytes = OURS,
        api_key: str | None = None,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.garble = garble
        self.lock = threading.Lock()
        owner = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                if self.path == "/health":
                    self.answer(b"")
                elif not self._is_allowed():
                    self.answer({}, 401)
                elif self.path == "/metrics":
                    self.answer(owner.metrics().encode(), kind="text/plain")
                elif self.path.startswith("/sojourn/v1/decisions"):
                    taken = [{"kind": "keep", "reason": "cold_start"}] * 3
                    self.answer({"decisions": taken, "next": 3})
                else:
                    self.answer(capabilities)

            def do_POST(self) -> None:
                body = self.read_json()
                if not self._is_allowed():
                    self.answer({}, 401)
                elif self.path.endswith("/events"):
                    owner.events += body["events"]
                    outcomes = [{"outcome": "applied"}] * len(body["events"])
                    self.answer({"v": 1, "outcomes": outcomes})
                else:
                    self.answer(owner.answer(body))

            def _is_allowed(self) -> bool:
                return api_key is None or self.headers["authorization"] == f"Bearer {api_key}"

        super().__init__(Handler)

    @property
    def forced(self) -> list[dict[str, Any]]:
        return [body for body in self.bodies if "replay_ids" in body.get("vllm_xargs", {})]

    def metrics(self) -> str:
        """A page of two engines: a request takes half a second and preempts two others."""
        count = len(self.bodies)
        return (
            "# HELP vllm:time_to_first_token_seconds …\n"
            'vllm:time_to_first_token_seconds_bucket{le="0.1"} 7.0\n'
            f'vllm:time_to_first_token_seconds_sum{{engine="0",model_name="a b"}} {0.5 * count}\n'
            f'vllm:time_to_first_token_seconds_count{{engine="0",model_name="a b"}} {count}\n'
            f'vllm:num_preemptions_total{{engine="0"}} {count}\n'
            f'vllm:num_preemptions_total{{engine="1"}} {count}\n'
        )

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.bodies.append(body)
            number = len(self.forced)
        ids = body.get("vllm_xargs", {}).get("replay_ids")
        message: dict[str, Any] = {"role": "assistant", "content": "free"}
        if ids:
            text = bytes(ids).decode()
            found = re.fullmatch(r"(.*\n)<tool_call>\n(.*)\n</tool_call><\|im_end\|>", text, re.DOTALL)
            assert found is not None, text
            call = json.loads(found.group(2))
            arguments = {"command": self.garble(number, call["arguments"]["command"])}
            function = {"name": call["name"], "arguments": json.dumps(arguments)}
            calls = [{"id": f"call-{number}", "type": "function", "function": function}]
            message = {"role": "assistant", "content": found.group(1), "tool_calls": calls}
        prompt = len(json.dumps(body["messages"]))
        return {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": len(ids or [0]),
                "total_tokens": prompt + len(ids or [0]),
                "prompt_tokens_details": {"cached_tokens": prompt // 2},
            },
        }
