from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from command_server import CommandServer
from json_handler import HandlerServer, JsonHandler
from live_frames import frame, row
from test_cli_explain import FOUND


@pytest.fixture
def tested_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend that a tested release of vLLM is installed, and give this test its own cache."""
    from sojourn_server.vllm import compat

    monkeypatch.setattr(compat, "installed_vllm", lambda: compat.TESTED_VLLM[-1])
    monkeypatch.setenv("SOJOURN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SOJOURN_UNTESTED_VLLM", raising=False)


@pytest.fixture
def live_server() -> Iterator[str]:
    """The address of a server with one program, ``fixer``, for ``sojourn top`` and ``sojourn explain``."""

    class Server(JsonHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            explanation = {**FOUND, "program_id": "fixer"}
            program = {"program_id": "fixer", "status": "acting", "turns": 2, "ledger": []}
            answer = {"stream": frame(row("fixer")), "explain": explanation, "fixer": program}
            self.answer(msgspec.json.encode(answer[path.rpartition("/")[2]]))

    with HandlerServer(Server) as server:
        yield server.url


@pytest.fixture
def model_server() -> Iterator[str]:
    """The address of a sojourn server with the model ``org/m``, and with an adapter of it."""
    models = [{"id": "org/m", "max_model_len": 40_000}, {"id": "lora", "max_model_len": None}]

    class Server(JsonHandler):
        def do_GET(self) -> None:
            self.answer({"name": "sojourn", "data": models})

    with HandlerServer(Server) as server:
        yield server.url


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], CommandServer]:
    """Let all commands of this process ask a server with these answers, whatever their ``--url``."""
    client = httpx.Client

    def use(answers: dict[str, Any]) -> CommandServer:
        server = CommandServer(answers)
        transport = httpx.MockTransport(server)
        monkeypatch.setattr(httpx, "Client", lambda **more: client(**{**more, "transport": transport}))
        return server

    return use
