"""The routes and the metrics of a real server, with one API server and with two."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engine_tools import SMALL_SERVER
from prometheus_client.parser import text_string_to_metric_families
from sojourn_server.launch.engine_server import EngineServer
from sojourn_server.metrics.metric_catalog import METRIC_CATALOG
from sojourn_server.vllm.compat import installed_vllm

pytestmark = pytest.mark.engine

KEY = "k-9d1f"
CONNECTIONS = 8
FLOOD = """
import json, sys, threading, httpx
url, key, connections = sys.argv[1], sys.argv[2], int(sys.argv[3])
def flood(n):
    common = {"type": "tool_start", "tool": "bash"}
    events = [{**common, "program_id": f"flood{n}-{i}", "seq": i, "call_id": f"c{i}"} for i in range(1000)]
    batch = json.dumps({"v": 1, "emitter": f"flood{n}", "events": events})
    with httpx.Client(headers={"authorization": f"Bearer {key}"}, timeout=None, trust_env=False) as http:
        answered = False
        while True:
            try:
                http.post(url + "/sojourn/v1/events", content=batch)
            except httpx.HTTPError:
                continue
            if not answered:
                print(n, flush=True)
            answered = True
for n in range(connections):
    threading.Thread(target=flood, args=(n,)).start()
"""
"""Floods a server with events until it is killed. A connection sends its next batch when the last one is
answered, and prints a line at its first answer."""

SMALL = ("--max-model-len", "2048", "--max-num-seqs", "8", "--num-gpu-blocks-override", "256")
ONE_SERVER = pytest.mark.parametrize("server", [1], ids=["one-api-server"], indirect=True)
ENGINE_ENV = {**SMALL_SERVER, "VLLM_LOGGING_LEVEL": "INFO"}


@pytest.fixture(
    scope="module",
    params=[1, pytest.param(2, marks=pytest.mark.nightly)],
    ids=["one-api-server", "two-api-servers"],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    env = dict(ENGINE_ENV)
    args = list(SMALL)
    if request.param > 1:
        args += ["--api-server-count", str(request.param)]
        env["PYTHONPATH"] = str(vllm_metadata(tmp_path_factory.mktemp("metadata")))
    log = tmp_path_factory.mktemp("log") / "server.log"
    with EngineServer("tiny", api_key=KEY, serve_args=args, env=env, log_path=log) as server:

        def all_loaded() -> bool:  # one API server answers before the other has started
            loaded = re.findall(r"\((\w+) pid=\d+\).*Loaded endpoint plugin sojourn", log.read_text())
            return len(set(loaded)) == request.param

        assert eventually(all_loaded, timeout_s=250.0)
        yield server


def vllm_metadata(directory: Path) -> Path:
    """Metadata of the name ``vllm``: without it the CPU build has no ``vllm serve``, the only way to
    several API servers."""
    release = (installed_vllm() or "").split("+")[0]
    version = f"{release}+cpu"  # where vLLM finds a version of this name, that is how it knows its platform
    info = directory / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return directory


def call(
    server: EngineServer, method: str, path: str, *, key: str | None = KEY, **kwargs: Any
) -> httpx.Response:
    """One request on a connection of its own, so that the kernel may choose either API server."""
    headers = {"authorization": f"Bearer {key}", **kwargs.pop("headers", {})} if key else {}
    return httpx.request(method, server.url + path, headers=headers, timeout=120, trust_env=False, **kwargs)


def report(server: EngineServer, *events: dict[str, Any], emitter: str = "e") -> list[str]:
    response = call(
        server, "POST", "/sojourn/v1/events", json={"v": 1, "emitter": emitter, "events": list(events)}
    )
    assert response.status_code == 200, response.text
    return [outcome["outcome"] for outcome in response.json()["outcomes"]]


def ask_model(server: EngineServer, program_id: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 4,
        "ignore_eos": True,
        "vllm_xargs": {"agentic_context": json.dumps({"program_id": program_id})},
        **fields,
    }
    response = call(server, "POST", "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0])


def metrics(server: EngineServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = call(server, "GET", "/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("sojourn_") and not sample.name.endswith("_created")
    }


def total(server: EngineServer, name: str, **labels: str) -> float:
    return sum(
        value
        for (found, at), value in metrics(server).items()
        if found == name and labels.items() <= dict(at).items()
    )


def eventually(condition: Callable[[], bool], timeout_s: float = 120.0) -> bool:
    """Metrics are polled once a second, so they may lag."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False


def test_a_program_is_followed_and_each_fact_is_counted_once(server: EngineServer) -> None:
    programs, turns = 6, 3
    before = metrics(server)
    # Each call takes a connection of its own: with two API servers both get events, and both poll.
    for p in range(programs):
        program_id = f"routes-{p}/é"
        seq = itertools.count()

        def happened(kind: str, **more: Any) -> dict[str, Any]:
            return {"type": kind, "program_id": program_id, "seq": next(seq), **more}  # noqa: B023

        assert report(server, happened("program_start")) == ["applied"]
        prompt = f"program {p} " + "word " * 150
        for turn in range(turns):
            prompt += f"turn {turn} " + "more " * 40
            ask_model(server, program_id, prompt)
            start = happened("tool_start", call_id="c", tool="bash")
            assert report(server, start) == ["applied"]
            assert report(server, start) == ["duplicate"]
            assert report(server, happened("tool_stop", call_id="c", duration_s=0.1)) == ["applied"]
        assert report(server, happened("program_end")) == ["applied"]

    program = call(server, "GET", "/sojourn/v1/programs/routes-0%2F%C3%A9").json()
    assert program["program_id"] == "routes-0/é"
    assert program["status"] == "ended"
    assert program["turns"] == turns
    listed = call(server, "GET", "/sojourn/v1/programs?status=ended&limit=2").json()
    assert (listed["shown"], listed["total"]) == (2, programs)
    assert call(server, "GET", "/sojourn/v1/stats").json()["programs"]["ended"] == programs

    assert (
        not before or sum(v for (name, _), v in before.items() if name == "sojourn_program_turns_total") == 0
    )
    done = programs * turns
    assert eventually(lambda: total(server, "sojourn_programs_finished_total", outcome="ok") == programs)
    assert total(server, "sojourn_program_turns_total") == done
    for kind, outcome, count in (
        ("program_start", "applied", programs),
        ("tool_start", "applied", done),
        ("tool_start", "duplicate", done),
        ("tool_stop", "applied", done),
        ("program_end", "applied", programs),
    ):
        assert total(server, "sojourn_events_total", type=kind, outcome=outcome) == count
    assert total(server, "sojourn_program_duration_seconds_count") == programs
    assert total(server, "sojourn_program_duration_seconds_bucket", le="+Inf") == programs
    assert total(server, "sojourn_tool_gap_seconds_count", tool="bash") == programs * (turns - 1)
    assert total(server, "sojourn_metrics_dropped_total") == 0
    assert eventually(lambda: total(server, "sojourn_programs", state="ended") == programs)
    blocks = {
        state: total(server, "sojourn_kv_blocks", state=state)
        for state in ("running", "leased", "cached", "free")
    }
    assert sum(blocks.values()) == 255  # all but the engine's null block
    time.sleep(2.5)  # counters stand still when nothing happens, however often they are polled
    assert total(server, "sojourn_program_turns_total") == done


CODEX = {
    "headers": {
        "session-id": "codex-1",
        "thread-id": "codex-2",
        "x-codex-parent-thread-id": "codex-1",
        "x-openai-subagent": "collab_spawn",
    },
    "json": {
        "model": "tiny",
        "max_output_tokens": 4,
        "stream": True,
        "store": False,
        "instructions": "word " * 100,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look around."}]}
        ],
        "prompt_cache_key": "codex-1",
    },
}


def test_a_coding_agents_sub_agent_is_a_program_with_a_parent(server: EngineServer) -> None:
    """``test_engine_gateway.py`` has one of Claude Code."""
    for _ in range(2):
        answer = call(server, "POST", "/v1/responses", **CODEX)
        assert answer.status_code == 200, answer.text
        assert "error" not in answer.text
    path = "/sojourn/v1/programs/codex-2"
    assert eventually(lambda: call(server, "GET", path).json().get("turns") == 2)
    program = call(server, "GET", path).json()
    assert (program["parent_program_id"], program["agent_type"]) == ("codex-1", "collab_spawn")
    listed = call(server, "GET", "/sojourn/v1/programs?limit=100").json()["programs"]
    assert "codex-1" not in [one["program_id"] for one in listed], "it has sent no request"


def test_a_turn_that_ends_with_a_stop_string_is_no_abort(server: EngineServer) -> None:
    """The API server finds the string and then aborts the request in the engine."""
    prompt = "Thought: I look. " * 20
    written = ask_model(server, "react-probe", prompt, max_tokens=16, temperature=0)["text"]
    answer = ask_model(server, "react", prompt, max_tokens=1000, temperature=0, stop=[written[2:6]])
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", written[2:6])
    path = "/sojourn/v1/programs/react"
    assert eventually(lambda: call(server, "GET", path).json()["turns"] == 1)
    (turn,) = call(server, "GET", path).json()["ledger"]
    assert turn["outcome"] == "stopped"


@ONE_SERVER
def test_the_policy_is_switched_while_a_request_runs_and_its_tokens_stay(server: EngineServer) -> None:
    # Less than a block, so that the second request finds nothing cached and computes what the first did.
    same = {"prompt": "Say it.", "max_tokens": 1500, "temperature": 0}
    expected = ask_model(server, "switch-1", **same)["text"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask_model, server, "switch-2", **same)
        assert eventually(lambda: call(server, "GET", "/sojourn/v1/stats").json()["requests"] == 1)
        switched = call(server, "POST", "/sojourn/v1/policy?on=false")
        assert not running.done()
        assert switched.json() == {"policy": "off", "started_with": "sojourn"}
        assert running.result()["text"] == expected
    assert eventually(lambda: call(server, "GET", "/sojourn/v1/capabilities").json()["policy"] == "off")
    command = ["-m", "sojourn_server.cli", "policy", "on", "--url", server.url, "--api-key", KEY]
    assert subprocess.check_output([sys.executable, *command], text=True) == f"{server.url}: policy sojourn\n"
    decisions = call(server, "GET", "/sojourn/v1/decisions").json()["decisions"]
    assert [each["reason"] for each in decisions if each["kind"] == "policy"] == ["off", "on"]


def test_the_exposition_is_within_the_catalogue(server: EngineServer) -> None:
    assert eventually(lambda: bool(metrics(server)))
    text = call(server, "GET", "/metrics").text
    families = {f.name: f for f in text_string_to_metric_families(text) if f.name.startswith("sojourn_")}
    known = {name.removesuffix("_total"): spec for name, spec in METRIC_CATALOG.items()}
    for name, family in families.items():
        if name.endswith("_created"):
            continue
        for sample in family.samples:
            assert set(sample.labels) - {"engine", "le"} == set(known[name].labels)
            assert sample.labels["engine"] == "0"
            assert "routes-" not in json.dumps(sample.labels)
    series = [sample for family in families.values() for sample in family.samples]
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in series]
    assert len(keys) == len(set(keys))
    assert "vllm:num_requests_running" in text


@ONE_SERVER
def test_a_flood_of_events_does_not_stop_generation(server: EngineServer) -> None:
    client = [sys.executable, "-c", FLOOD, server.url, KEY, str(CONNECTIONS)]
    flood = subprocess.Popen(client, stdout=subprocess.PIPE, text=True)
    try:
        assert flood.stdout is not None
        for _ in range(CONNECTIONS):
            assert flood.stdout.readline()
        for number in range(5):
            ask_model(server, f"flooded{number}", f"program {number} " + "word " * 150)
        assert flood.poll() is None, "it went on for all the time"
    finally:
        flood.kill()
        flood.communicate()


def test_a_hung_engine_is_answered_for_and_loses_no_event(server: EngineServer) -> None:
    batch = {"v": 1, "emitter": "e", "events": [{"type": "program_start", "program_id": "late", "seq": 0}]}
    engine = engine_pid(server)
    os.kill(engine, signal.SIGSTOP)
    try:
        started = time.monotonic()
        response = call(server, "POST", "/sojourn/v1/events", json=batch)
        assert response.status_code == 503
        assert 4 < time.monotonic() - started < 100, "and not for as long as the engine hangs"
        assert int(response.headers["retry-after"]) > 0
    finally:
        os.kill(engine, signal.SIGCONT)
    repeated = call(server, "POST", "/sojourn/v1/events", json=batch)
    assert repeated.json()["outcomes"][0]["outcome"] in ("duplicate", "applied"), "sent before, or only now"


def engine_pid(server: EngineServer) -> int:
    """The engine core's process."""
    children = psutil.Process(server.pid).children(recursive=True)
    [engine] = [child.pid for child in children if child.name().startswith("VLLM::EngineCor")]
    return engine


@pytest.mark.nightly
def test_a_stock_scheduler_with_the_plugin_says_so(tmp_path: Path) -> None:
    # Somebody sets VLLM_PLUGINS for plain vllm; `sojourn serve --policy stock` would not load us.
    from sojourn_server.models import resolve_model

    with PlainServer(resolve_model("tiny", progress=False), tmp_path / "log") as server:
        response = httpx.get(f"{server.url}/sojourn/v1/capabilities", timeout=120, trust_env=False)
        assert response.status_code == 501
        assert "sojourn serve" in response.json()["error"]["next"]
        time.sleep(2.5)
        assert "Traceback" not in (tmp_path / "log").read_text()


class PlainServer(EngineServer):
    """vLLM's own server with our plugin named and none of our flags."""

    def __init__(self, model_path: str, log_path: Path) -> None:
        super().__init__("tiny", env={**ENGINE_ENV, "VLLM_PLUGINS": "sojourn"}, log_path=log_path)
        self._model_path = model_path

    def _command(self) -> list[str]:
        return [
            sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server",
            "--model", self._model_path, "--host", "127.0.0.1", "--port", str(self.port),
            "--served-model-name", "tiny", "--enforce-eager", *SMALL,
        ]  # fmt: skip
