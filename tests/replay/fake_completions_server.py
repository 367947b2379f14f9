"""A tiny OpenAI-compatible server over real HTTP with a prefix cache of whole blocks, for tests."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from json_handler import HandlerServer, JsonHandler


class FakeServer(HandlerServer):
    """``requests`` has the received requests."""

    def __init__(self, **quirks: Any) -> None:
        self.model = "fake"
        self.block_size = 16
        self.max_model_len: int | None = 100_000
        self.api_key: str | None = None
        self.forgets = False
        self.obeys_replay = True
        self.sojourn = False
        self.engine: Any = {}
        """What the plugin says of the engine, besides its block size."""
        self.metrics = ""
        self.seconds_per_token = 0.0
        self.status: int | None = None
        self.__dict__.update(quirks)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.events: list[dict[str, Any]] = []
        self.live = self.most_live = 0
        self.lock = threading.Lock()
        self._cache: set[tuple[int, ...]] = set()
        outer = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                outer.get(self)

            def do_POST(self) -> None:
                outer.post(self)

        super().__init__(Handler)

    def _refused(self, handler: JsonHandler) -> bool:
        if self.api_key and handler.headers.get("Authorization") != f"Bearer {self.api_key}":
            handler.answer({"error": "Unauthorized"}, 401)
            return True
        return False

    def get(self, handler: JsonHandler) -> None:
        if self._refused(handler):
            return
        if handler.path == "/v1/models":
            entry = {"id": self.model, "owned_by": "fake", "max_model_len": self.max_model_len}
            handler.answer({"data": [entry]})
        elif handler.path == "/version":
            handler.answer({"version": "1.2"})
        elif handler.path == "/sojourn/v1/capabilities" and self.sojourn:
            engine = self.engine
            if isinstance(engine, dict):
                engine = {"block_size": str(self.block_size), **engine}
            handler.answer({"name": "sojourn", "wire": [1], "engine": engine})
        elif handler.path == "/metrics" and self.metrics:
            handler.answer(self.metrics.encode(), kind="text/plain")
        else:
            handler.answer({"error": "no such path"}, 404)

    def post(self, handler: JsonHandler) -> None:
        body = handler.read_json()
        if self._refused(handler):
            return
        if handler.path == "/sojourn/v1/events":
            with self.lock:
                self.events += body["events"]
            handler.answer({"v": 1, "outcomes": [{"outcome": "applied"} for _ in body["events"]]})
            return
        with self.lock:
            self.requests.append(body)
            self.headers.append(dict(handler.headers.items()))
            self.live += 1
            self.most_live = max(self.most_live, self.live)
        try:
            self._complete(handler, body)
        finally:
            with self.lock:
                self.live -= 1

    def _complete(self, handler: JsonHandler, body: dict[str, Any]) -> None:
        if self.status is not None:
            handler.answer({"error": {"message": "broken on purpose"}}, self.status)
            return
        prompt, count = body["prompt"], body["max_tokens"]
        if self.max_model_len and len(prompt) + count > self.max_model_len:
            handler.answer({"error": {"message": "maximum context length exceeded"}}, 400)
            return
        cached = self._cached(prompt)
        time.sleep((len(prompt) - cached) * self.seconds_per_token)
        forced = (body.get("vllm_xargs") or {}).get("replay_ids") if self.obeys_replay else None
        output = forced or [(sum(prompt) + i) % 90 + 5 for i in range(count)]
        self._remember(prompt + output[:-1])
        usage = {
            "prompt_tokens": len(prompt), "completion_tokens": len(output),
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
        asks_ids = body.get("return_token_ids")
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "text": "x", **({"token_ids": [token]} if asks_ids else {})}]}
            for token in output
        ]
        chunks.append({"choices": [], "usage": usage})
        data = b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"
        handler.answer(data, kind="text/event-stream")

    def _cached(self, prompt: list[int]) -> int:
        best = 0
        with self.lock:
            for end in range(self.block_size, len(prompt), self.block_size):
                if tuple(prompt[:end]) not in self._cache:
                    break
                best = end
        return best

    def _remember(self, tokens: list[int]) -> None:
        if self.forgets:
            return
        with self.lock:
            for end in range(self.block_size, len(tokens) + 1, self.block_size):
                self._cache.add(tuple(tokens[:end]))
