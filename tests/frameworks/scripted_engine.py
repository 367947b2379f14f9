"""A real engine with scripted answers, by forced tokens, with its own chat template and tool parser.

``ScriptedEngine`` is a proxy in front of ``sojourn serve tiny``. It adds the tokens of the script's next
answer to each LLM request and passes everything else through as it is: headers, streams as they come, the
client's disconnects, and the events.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from json_handler import HandlerServer, JsonHandler
from scenario_modules import Model
from sojourn.config import LLM_PATHS
from sojourn.testing import Answer, LlmRequest
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.launch.serve_command import FORCED_TOKENS
from sojourn_server.models.chat_format import END_OF_MESSAGE, assistant_text

PYTHON = Path(__file__).parents[2] / ".venv" / "bin" / "python"
"""Python of the environment that has the engine. The frameworks' own environments have none."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NOT_PASSED_ON = {"connection", "transfer-encoding", "content-length", "host", "accept-encoding"}


class Engine(EngineServer):
    """``sojourn serve tiny``, started from the engine's environment."""

    def __init__(self) -> None:
        arguments = ["--max-model-len", "8192", "--logits-processors", FORCED_TOKENS]
        # A frameworks' folder on the path would hide the engine's packages. With the worker in the engine's
        # own process, the engine starts in two thirds of the time.
        env = {"PYTHONPATH": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        super().__init__("tiny", serve_args=arguments, env=env, ready_timeout_s=400)

    def _command(self) -> list[str]:
        return [str(PYTHON), *super()._command()[1:]]


def require_engine() -> None:
    """Skip the test if there is no engine. In CI, fail instead."""
    if not PYTHON.exists():
        give_up = pytest.fail if os.environ.get("CI", "").lower() in ("1", "true") else pytest.skip
        give_up(f"no engine: {PYTHON} is not there (make setup)")


class ScriptedEngine(HandlerServer):
    """``with ScriptedEngine(engine.url, model) as proxy:`` answers LLM requests as ``model`` says."""

    def __init__(self, engine_url: str, model: Model) -> None:
        super().__init__(type("Handler", (_Handler,), {"proxy": self}))
        self._http.block_on_close = False
        # In many scenarios the client disconnects during an answer.
        self._http.handle_error = lambda request, client_address: None  # type: ignore[method-assign]
        self.engine = engine_url.removeprefix("http://")
        self.model = model
        self.requests: list[LlmRequest] = []
        """Requests as the client sent them."""
        self.base_url = f"{self.url}/v1"

    def scripted(self, request: LlmRequest) -> dict[str, Any]:
        """The request with the next answer's tokens in it."""
        answer = self.model(request)
        ids = _tokens(self.engine, _text(answer))
        given = request.body.get("vllm_xargs") or {}
        # The tokens end by themselves. A limit below the script's length would cut a tool call in two.
        limits = {name: max(limit, len(ids)) for name in _LIMITS if (limit := request.body.get(name))}
        return {**request.body, **limits, "vllm_xargs": {**given, "replay_ids": list(ids)}}


def get(url: str, path: str) -> Any:
    """An answer of the engine's own routes; ``None`` for 404."""
    response = httpx.get(url + path, timeout=30)
    assert response.status_code in (200, 404), response.text
    return response.json() if response.status_code == 200 else None


def _text(answer: Answer) -> str:
    calls = [{"name": use.name, "arguments": dict(use.arguments)} for use in answer.tools]
    return assistant_text(answer.text, calls) + END_OF_MESSAGE


@lru_cache
def _tokens(engine: str, text: str) -> tuple[int, ...]:
    connection = http.client.HTTPConnection(engine, timeout=30)
    with closing(connection):
        body = {"model": "tiny", "prompt": text, "add_special_tokens": False}
        connection.request("POST", "/tokenize", json.dumps(body), {"content-type": "application/json"})
        return tuple(json.loads(connection.getresponse().read())["tokens"])


class _Handler(JsonHandler):
    disable_nagle_algorithm = True
    proxy: ScriptedEngine

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        if not self.path.partition("?")[0].endswith(LLM_PATHS):
            self._pass_on(data)
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = LlmRequest(self.path, headers, json.loads(data))
        self.proxy.requests.append(request)
        self._pass_on(json.dumps(self.proxy.scripted(request)).encode())

    def _pass_on(self, data: bytes | None) -> None:
        upstream = http.client.HTTPConnection(self.proxy.engine, timeout=120)
        with closing(upstream):
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _NOT_PASSED_ON}
            upstream.request(self.command, self.path, data, headers)
            response = upstream.getresponse()
            kept = {k: v for k, v in response.getheaders() if k.lower() not in _NOT_PASSED_ON}
            if response.headers.get("transfer-encoding") == "chunked":
                self._stream(response, kept)
            else:
                data = response.read()
                self._head(response.status, {**kept, "content-length": str(len(data))})
                self.wfile.write(data)

    def _stream(self, response: http.client.HTTPResponse, headers: Mapping[str, str]) -> None:
        self._head(response.status, {**headers, "transfer-encoding": "chunked"})
        # If the client disconnects, leaving this block closes the engine's side too, which aborts the
        # request.
        with suppress(ConnectionError):
            while chunk := response.read1():
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
