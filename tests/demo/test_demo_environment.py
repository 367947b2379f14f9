"""The variables that the demo sets for its agents' libraries: proxies, and mini-swe-agent's settings."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")

from echo_engine import EchoEngine
from sojourn_server.demo.demo_agent import prepare_environment
from sojourn_server.demo.demo_run import warm_up

PROXY_VARIABLES = ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy")


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy for all hosts at a port that refuses connections."""
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as bound:  # not listening, and taken
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{bound.getsockname()[1]}")
        yield


@pytest.mark.usefixtures("dead_proxy")
def test_the_agents_client_reaches_a_server_on_this_machine_past_the_proxy(tmp_path: Path) -> None:
    with EchoEngine() as engine:
        prepare_environment(tmp_path)
        warm_up(engine.url, "m")
    assert len(engine.bodies) == 1


@pytest.mark.usefixtures("dead_proxy")
def test_an_error_of_the_agents_client_names_the_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with EchoEngine() as engine:
        prepare_environment(tmp_path, "http://engine.example:8000")
        # The proxy stays in force, and this server is behind it.
        expected = rf"first request to {re.escape(engine.url)} failed: .*Error"
        with pytest.raises(RuntimeError, match=expected):
            warm_up(engine.url, "m")
    assert engine.bodies == []
    assert capfd.readouterr().out == ""  # stdout may carry the JSON
