"""Clients that die or go away, engines and gateways that are stopped, killed and restarted under load.

What a client held comes back. Streams held over a restart end with their whole answer or an error, every
count of requests comes back, and an agent with the SDK goes on. One engine, which keeps its port.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sojourn
from engine_tools import SMALL_SERVER
from gateway_process import GatewayProcess
from sojourn_server.core.leases import SILENCE_S
from sojourn_server.launch.engine_server import EngineServer
from waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "8", "--num-gpu-blocks-override", "512")
STREAMS = 6
ENDS_WITHIN_S = 150.0
"""Longest time from a server's end to the end of each stream from it, beside other work."""
WHOLE_WITHIN_S = 300.0
"""The same for streams that are written to their end, by an engine beside other work."""
SILENT_WITHIN_S = 35.0 + 60.0
"""From a client's death to its lease's end, and a minute for other work. The lease would last 250 s."""
CALL_WITHIN_S = 20.0
"""Longest call of the SDK, beside other work; a call that waited for the server would take a minute."""
STREAM = {
    "model": "tiny", "prompt": list(range(1000, 1100)), "max_tokens": 1000, "ignore_eos": True,
    "stream": True,
}  # fmt: skip


CLIENT = """
import sys, time
import httpx, sojourn
url = sys.argv[1]
sojourn.init(url, probe_timeout_s=10)
with sojourn.program("doomed", kv_retention_ttl_s=250):
    body, headers = sojourn.request_parts()
    httpx.post(url + "/v1/completions", headers=headers, timeout=120, trust_env=False,
               json={"model": "tiny", "prompt": list(range(1000, 1600)), "max_tokens": 4, **body}
               ).raise_for_status()
    with sojourn.tool_call("bash", tool_class="sleep"):
        sojourn.flush(5)
        print("in the tool", flush=True)
        time.sleep(600)
"""


class Engine:
    """A server that is started again at its port: first with a policy that has leases, then as usual."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lives: list[EngineServer] = []

    @property
    def server(self) -> EngineServer:
        """Started where it does not run."""
        if not self._lives or self._lives[-1].pid is None:
            port = self._lives[0].port if self._lives else 0
            log = self._folder / f"{len(self._lives)}.log"
            policy = None if self._lives else "continuum"
            server = EngineServer(
                "tiny", policy=policy, serve_args=FLAGS, env=SMALL_SERVER, log_path=log, port=port
            )
            self._lives.append(server)
            server.start()
        return self._lives[-1]

    def wait_for_end(self) -> None:
        """Wait until its process has ended by itself."""
        server = self._lives[-1]
        wait_until(lambda: server.code is not None, server.log_tail, ENDS_WITHIN_S)
        self.stop()

    def stop(self) -> None:
        for server in self._lives:
            server.stop()


class Holder(threading.Thread):
    """A client that holds a stream, and how the stream ended."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.parts = 0
        self.end: str | None = None
        """``whole``, ``error`` (inside the stream, or the connection's), or ``cut`` (neither)."""
        self._url = url
        self.start()

    def run(self) -> None:
        end, url = "cut", f"{self._url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=STREAM, timeout=300.0, trust_env=False) as answer:
                answer.raise_for_status()
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


class Agent(threading.Thread):
    """An agent with the SDK: turns with tools between them, whatever its server does."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.longest_call_s = 0.0
        self.answered = self.failed = 0
        self.failure: BaseException | None = None
        self._url, self._go_on = url, True
        self.start()

    def stop(self) -> None:
        self._go_on = False
        self.join(60)
        assert not self.is_alive(), "the agent hangs"
        assert self.failure is None, repr(self.failure)

    def run(self) -> None:
        try:
            with sojourn.program("survivor"), httpx.Client(base_url=self._url, trust_env=False) as http:
                while self._go_on:
                    self._take_turn(http)
        except BaseException as error:
            self.failure = error

    def _take_turn(self, http: httpx.Client) -> None:
        fields, headers = self._timed(sojourn.request_parts)
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, **fields}
        try:
            http.post("/v1/completions", json=body, headers=headers, timeout=60.0).raise_for_status()
            self.answered += 1
        except httpx.HTTPError:
            self.failed += 1
        call = sojourn.tool_call("bash")
        self._timed(call.__enter__)
        time.sleep(0.05)
        self._timed(lambda: call.__exit__(None, None, None))
        self._timed(lambda: sojourn.flush(0.1))

    def _timed(self, call: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        try:
            return call()
        finally:
            self.longest_call_s = max(self.longest_call_s, time.monotonic() - begin)


def hold_streams(url: str) -> list[Holder]:
    """Streams of which each has begun."""
    held = [Holder(url) for _ in range(STREAMS)]
    wait_until(lambda: all(one.parts > 2 for one in held), lambda: [one.parts for one in held], ENDS_WITHIN_S)
    return held


def assert_ended(held: list[Holder], *allowed: str, within_s: float = ENDS_WITHIN_S) -> None:
    """Each stream ended in one of these ways, within its time."""
    wait_until(lambda: all(one.end for one in held), lambda: [one.end for one in held], within_s)
    assert {one.end for one in held} <= set(allowed)


def stats(url: str) -> Any:
    """They may be half a second old, so nobody asks more often."""
    time.sleep(0.25)
    return httpx.get(f"{url}/sojourn/v1/stats", timeout=90, trust_env=False, verify=False).json()


def assert_nothing_runs(url: str) -> None:
    """Requests, leases and blocks of an engine are back."""

    def left() -> tuple[int, int]:
        told = stats(url)
        return told["requests"], told["blocks"]["running"]

    wait_until(lambda: left() == (0, 0), left)


def complete(url: str, fields: Any = (), headers: Any = None) -> httpx.Response:
    body = {"model": "tiny", "prompt": "again", "max_tokens": 2, **dict(fields)}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False)


def turns_after_another(url: str, program: Any) -> int:
    """Turns that the engine knows of the program, after one more with a tool before it."""
    with sojourn.tool_call("bash"):
        pass
    assert complete(url, *sojourn.request_parts(program)).status_code == 200
    told = httpx.get(f"{url}/sojourn/v1/programs/{program.id}", timeout=90, trust_env=False)
    return int(told.json()["turns"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(tmp_path_factory.mktemp("engine"))
    yield made
    made.stop()


def test_a_client_killed_in_its_tool_loses_its_lease_within_35_seconds(engine: Engine) -> None:
    url = engine.server.url
    before = stats(url)["blocks"]
    client = subprocess.Popen([sys.executable, "-c", CLIENT, url], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline().strip() == "in the tool"
        wait_until(lambda: stats(url)["leases"] == 1)
        # Heartbeats keep it alive past the silence it would be granted without them.
        end_s = time.monotonic() + SILENCE_S + 2.0
        while time.monotonic() < end_s:
            assert stats(url)["leases"] == 1
    finally:
        client.kill()
        client.communicate()
    wait_until(lambda: stats(url)["leases"] == 0, lambda: stats(url)["leases"], SILENT_WITHIN_S)
    pool = stats(url)["blocks"]
    assert pool["cached"] + pool["free"] == before["cached"] + before["free"] == sum(pool.values())


def test_clients_of_an_engine_that_is_ended_do_not_sit_silent_and_agents_go_on(engine: Engine) -> None:
    """After SIGTERM vLLM alone left streams silent for as long as their clients cared to wait, and ran on.
    Two more connections are idle. The next engine has never heard of the agents' programs."""
    url = engine.server.url
    sojourn.init(url, probe_timeout_s=10.0, instrument=False)
    agent = Agent(url)
    try:
        program = sojourn.program("by turns").make()
        program.start()
        assert turns_after_another(url, program) == 1
        with (
            socket.create_connection(("127.0.0.1", engine.server.port)),
            httpx.Client(trust_env=False) as idle,
        ):
            assert idle.get(f"{url}/health").status_code == 200
            held = hold_streams(url)
            wait_until(lambda: agent.answered > 2, lambda: agent.failed)
            assert engine.server.pid is not None
            os.kill(engine.server.pid, signal.SIGTERM)  # to the API server alone, as from a supervisor
            assert_ended(held, "whole", "error")
            engine.wait_for_end()
        failed = agent.failed
        wait_until(lambda: agent.failed > failed + 3, lambda: agent.failed)
        assert engine.server.url == url
        assert turns_after_another(url, program) == 1
        program.end("ok")
        answered, applied = agent.answered, sojourn.stats()["outcome_applied"]
        wait_until(lambda: agent.answered > answered + 3, lambda: agent.answered)
        # The SDK pauses after failures, for half a minute at most.
        wait_until(lambda: sojourn.stats()["outcome_applied"] > applied + 3, sojourn.stats, 180.0)
        agent.stop()
        assert agent.longest_call_s < CALL_WITHIN_S
        assert_nothing_runs(url)
    finally:
        agent._go_on = False
        sojourn.shutdown()


def test_a_gateway_that_gets_sigterm_finishes_its_streams(engine: Engine, tmp_path: Path) -> None:
    with GatewayProcess([engine.server.url], tmp_path / "gateway.log") as gateway:
        held = hold_streams(gateway.url)
        begin = time.monotonic()
        os.kill(gateway.pid, signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            wait_until(lambda: httpx.get(f"{gateway.url}/health", trust_env=False).status_code != 200)
        assert_ended(held, "whole", "error", within_s=WHOLE_WITHIN_S)
        if time.monotonic() - begin < 55:  # it gives streams a minute
            assert {one.end for one in held} == {"whole"}
        wait_until(lambda: gateway.has_ended, within_s=150.0)
    assert_nothing_runs(engine.server.url)


def test_a_gateway_that_is_killed_ends_its_streams_and_leaves_nothing_running(
    engine: Engine, tmp_path: Path
) -> None:
    with GatewayProcess([engine.server.url], tmp_path / "gateway.log") as gateway:
        held = hold_streams(gateway.url)
        os.kill(gateway.pid, signal.SIGKILL)
        assert_ended(held, "error")
    assert_nothing_runs(engine.server.url)
    with GatewayProcess([engine.server.url], tmp_path / "later.log") as gateway:
        assert complete(gateway.url).status_code == 200
