"""Clients that die, go away or speak to an engine that was restarted: a real server, real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_tools import SMALL_SERVER
from sojourn_server.launch.engine_server import EngineServer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = ("--max-model-len", "2048", "--max-num-seqs", "8", "--num-gpu-blocks-override", "256")

CLIENT = """
import sys, time
import httpx, sojourn
url = sys.argv[1]
sojourn.init(url, probe_timeout_s=10)
with sojourn.program("doomed", kv_retention_ttl_s=250):
    body, headers = sojourn.request_parts()
    httpx.post(url + "/v1/completions", headers=headers, timeout=60, trust_env=False,
               json={"model": "tiny", "prompt": list(range(1000, 1600)), "max_tokens": 4, **body}
               ).raise_for_status()
    with sojourn.tool_call("bash", tool_class="sleep"):
        sojourn.flush(5)
        print("in the tool", flush=True)
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with EngineServer("tiny", policy="continuum", serve_args=SMALL, env=SMALL_SERVER, log_path=log) as server:
        yield server


def stats(server: EngineServer) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/sojourn/v1/stats", timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until ``condition`` held; fails after ``seconds``."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it did not happen in time"
        time.sleep(0.25)
    return time.monotonic() - begin


def test_a_client_killed_in_its_tool_loses_its_lease_within_35_seconds(server: EngineServer) -> None:
    baseline = stats(server)["pool"]
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.url], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert client.stdout is not None
        assert client.stdout.readline().strip() == "in the tool"
        # Answers may be half a second old.
        wait_until(lambda: stats(server)["leases"]["count"] == 1, 5.0)
        # Heartbeats keep it alive past the silence it would be granted without them.
        time.sleep(24)
        assert stats(server)["leases"]["count"] == 1
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait()
    wait_until(lambda: stats(server)["leases"]["count"] == 0, 35.0)
    pool = stats(server)["pool"]
    assert pool["cached"] + pool["free"] == baseline["cached"] + baseline["free"] == pool["total"]


def test_a_stream_that_is_broken_off_leaves_nothing_running(server: EngineServer) -> None:
    context = json.dumps({"program_id": "broken-off", "sojourn": {"v": 1}})
    body = {
        "model": "tiny",
        "prompt": list(range(2000, 2600)),
        "max_tokens": 1200,
        "ignore_eos": True,
        "stream": True,
        "vllm_xargs": {"agentic_context": context},
    }
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False
    ) as answer:
        lines = answer.iter_lines()  # kept: the stream ends with its iterator
        next(lines)
        time.sleep(0.6)  # answers may be half a second old
        assert stats(server)["requests"] == 1
    wait_until(lambda: stats(server)["requests"] == 0, 30.0)
    after = stats(server)
    assert after["leases"]["count"] == 0
    assert after["pool"]["running"] == 0


def test_agents_go_on_after_the_engine_was_restarted(server: EngineServer, tmp_path: Path) -> None:
    """The same port, a new engine: program ids it never heard of are opened again by their next request.

    The last test here: the others' server ends in it.
    """
    import sojourn

    def take_turn() -> dict[str, Any]:
        """With a tool before it; what the engine then knows of the program."""
        with sojourn.tool_call("bash"):
            pass
        body, headers = sojourn.request_parts(program)
        answer = httpx.post(
            f"{server.url}/v1/completions",
            headers=headers,
            json={"model": "tiny", "prompt": "again", "max_tokens": 2, **body},
            timeout=60,
            trust_env=False,
        )
        assert answer.status_code == 200
        url = f"{server.url}/sojourn/v1/programs/{program.id}"
        return dict(httpx.get(url, timeout=30, trust_env=False).json())

    try:
        sojourn.init(server.url, probe_timeout_s=10)
        program = sojourn.program("survivor").make()
        program.start()
        assert take_turn()["turns"] == 1
        port = server.port
        server.stop()
        with EngineServer(
            "tiny", serve_args=SMALL, env=SMALL_SERVER, log_path=tmp_path / "later.log", port=port
        ):
            assert take_turn()["turns"] == 1
        program.end("ok")
    finally:
        sojourn.shutdown()
