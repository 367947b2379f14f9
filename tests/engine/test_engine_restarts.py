"""Engines and gateways that are stopped, killed and restarted under load: no client waits without end.

Streams held over a restart end with an error or with their whole answer, every count of requests comes back,
and an agent with the SDK goes on.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_tools import SMALL_SERVER
from sojourn_server.launch.engine_server import EngineServer
from waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "8", "--num-gpu-blocks-override", "512")
STREAMS = 6
ENDS_WITHIN_S = 45.0
"""Longest time from a server's end to the end of each stream from it, beside other work."""
STREAM = {
    "model": "tiny", "prompt": list(range(1000, 1100)), "max_tokens": 1900, "ignore_eos": True,
    "stream": True,
}  # fmt: skip


class Holder(threading.Thread):
    """A client that holds a stream, and how the stream ended."""

    def __init__(self, url: str, **more: Any) -> None:
        super().__init__(daemon=True)
        self.parts = 0
        self.end: str | None = None
        """``whole``, ``error`` (inside the stream, or the connection's), or ``cut`` (neither)."""
        self._url = url
        self._body = {**STREAM, **more}
        self.start()

    def run(self) -> None:
        end = "cut"
        try:
            timeout = httpx.Timeout(300.0)
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._body, timeout=timeout, trust_env=False
            ) as answer:
                if answer.status_code != 200:
                    end = "error"
                    return
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        end = "whole" if end == "cut" else end
                    elif '"error"' in line[:40]:
                        end = "error"
                    self.parts += line.startswith("data: {")
        except httpx.HTTPError:
            end = "error"
        finally:
            self.end = end


def hold_streams(url: str, **more: Any) -> list[Holder]:
    """Streams of which each has begun."""
    held = [Holder(url, **more) for _ in range(STREAMS)]
    wait_until(lambda: all(one.parts > 2 for one in held), lambda: [one.parts for one in held], 60.0)
    return held


def assert_ended(held: list[Holder]) -> None:
    """Each stream ended within its time, with its whole answer or an error."""
    wait_until(lambda: all(one.end for one in held), lambda: [one.end for one in held], ENDS_WITHIN_S)
    assert {one.end for one in held} <= {"whole", "error"}


def ended(pid: int) -> bool:
    """A child of ours has ended."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EngineServer]]:
    """Start engines that are ended with the test."""
    started: list[EngineServer] = []

    def one(port: int = 0) -> EngineServer:
        log = tmp_path / f"engine-{len(started)}.log"
        server = EngineServer("tiny", serve_args=FLAGS, env=SMALL_SERVER, log_path=log, port=port)
        started.append(server)
        return server.start()

    yield one
    for server in started:
        server.stop()


def test_streams_of_an_engine_that_gets_sigterm_end_and_so_does_the_engine(
    start: Callable[..., EngineServer],
) -> None:
    """vLLM alone left them silent for as long as they cared to wait. Two more connections are idle."""
    server = start()
    with socket.create_connection(("127.0.0.1", server.port)), httpx.Client(trust_env=False) as idle:
        assert idle.get(f"{server.url}/health").status_code == 200
        held = hold_streams(server.url)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGTERM)
        assert_ended(held)
        pid = server.pid
        wait_until(lambda: ended(pid), lambda: server.log_tail(), ENDS_WITHIN_S)
