"""The peers themselves, run for real in front of a small backend: do they take what we say?

They are not installed with sojourn. Each needs a Python environment of its own, named by a variable:

    python -m venv ta     && ta/bin/pip install <a clone of ThunderAgent-org/ThunderAgent>
    python -m venv router && router/bin/pip install vllm-router
    python -m venv dynamo && dynamo/bin/pip install ai-dynamo
    PEER_THUNDERAGENT=ta/bin/python PEER_VLLM_ROUTER=router/bin/python PEER_DYNAMO=dynamo/bin/python \\
        python -m pytest tests/sdk/test_sdk_dialects_live_servers.py

Without the variable, and without the package beside sojourn, a test is skipped and says so. SGLang is not
among them: its engine wants a GPU and gigabytes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import sojourn
from sojourn.dialects import DIALECTS
from sojourn.hints import AgenticContext, SojournContext

pytestmark = [pytest.mark.engine, pytest.mark.slow]

METRICS = b"""vllm:num_requests_running{engine="0"} 0
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0
vllm:cache_config_info{block_size="16",num_gpu_blocks="4096",engine="0"} 1
"""
HINTS = {
    "bare": AgenticContext(program_id="p-1"),
    "all": AgenticContext(
        program_id="p-2",
        parent_program_id="p-1",
        root_program_id="p-1",
        blocks_parent=True,
        expected_resume=True,
        request_id="r-1",
        step_id="7",
        priority=3,
        deadline_seconds=60.0,
        expected_output_length=20,
        kv_retention_ttl_seconds=5.0,
        sojourn=SojournContext(agent_type="coder", node="edit", heartbeat=True, final=True),
    ),
    "a step with a name, and a block without a parent": AgenticContext(
        program_id="p-3", step_id="plan", blocks_parent=True
    ),
    "its own parent": AgenticContext(program_id="p-4", parent_program_id="p-4", blocks_parent=True),
    "huge numbers": AgenticContext(
        program_id="p-5",
        priority=2**40,
        deadline_seconds=1e300,
        expected_output_length=2**62,
        kv_retention_ttl_seconds=1e300,
    ),
    "very negative": AgenticContext(program_id="p-6", priority=-(2**70), deadline_seconds=0.0),
    "256 bytes": AgenticContext(program_id="x" * 256, parent_program_id="y" * 256),
    "beyond ASCII": AgenticContext(program_id="агент 7", parent_program_id="é" * 128),
    "256 bytes beyond ASCII": AgenticContext(program_id="é" * 128),
    "blanks": AgenticContext(program_id=" \t "),
    "implicit": AgenticContext(program_id="p-7", priority=1, sojourn=SojournContext(implicit=True)),
}


class Backend:
    """Plays a vLLM server as far as a router looks at it."""

    def __init__(self):
        self.bodies = []
        self.delay_s = 0.0
        backend = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                model = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 4096}
                pages = {
                    "/health": b"",
                    "/metrics": METRICS,
                    "/v1/models": json.dumps({"object": "list", "data": [model]}).encode(),
                }
                path = self.path.partition("?")[0]
                self.say(200 if path in pages else 404, pages.get(path, b"{}"))

            def do_POST(self):
                backend.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                time.sleep(backend.delay_s)
                choice = {
                    "index": 0,
                    "message": {"role": "assistant", "content": "hi"},
                    "finish_reason": "stop",
                }
                usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
                answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
                self.say(200, json.dumps({**answer, "choices": [choice], "usage": usage}).encode())

            def say(self, status, body):
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self._server.shutdown()
        self._server.server_close()


def interpreter(variable, module):
    """A Python that has the peer, or the reason to skip."""
    named = os.environ.get(variable)
    if named:
        return named
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed here; {variable} may name a Python that has it")
    return sys.executable


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(command, url, path, log, env=None):
    """The peer, once ``path`` answers 200."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
        )
        try:
            deadline_s = time.monotonic() + 60
            while not _answers(url + path):
                assert process.poll() is None, Path(log).read_text(errors="replace")[-3000:]
                assert time.monotonic() < deadline_s, Path(log).read_text(errors="replace")[-3000:]
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(15)


def _answers(url):
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def chat(url, body=None, headers=None, model="m"):
    message = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    return httpx.post(
        f"{url}/v1/chat/completions", json={**message, **(body or {})}, headers=headers, timeout=30
    )


def ask(url):
    """One program with one request, as an agent would send it."""
    body, headers = sojourn.request_parts()
    return chat(url, body, headers)


# ---- ThunderAgent


@pytest.fixture(params=["tr", "default"])
def thunderagent(request, tmp_path):
    python = interpreter("PEER_THUNDERAGENT", "ThunderAgent")
    with Backend() as backend:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [python, "-m", "ThunderAgent", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--backends", backend.url, "--router", request.param]
        with running(command, url, "/health", tmp_path / "log"):
            yield url, backend


def test_thunderagent_knows_the_program_until_it_is_released(thunderagent):
    url, backend = thunderagent
    sojourn.init(url, probe_timeout_s=10)
    assert sojourn.stats().dialect == "thunderagent"  # recognised, not told
    with sojourn.program(id="агент-7"):
        assert ask(url).status_code == 200
        assert ask(url).status_code == 200
        programs = httpx.get(f"{url}/programs").json()
        assert set(programs) == {"агент-7"}
        assert programs["агент-7"]["step_count"] == 2
    assert sojourn.flush(10)
    assert httpx.get(f"{url}/programs").json() == {}
    assert all("program_id" not in body for body in backend.bodies)  # it keeps the id to itself
    assert sojourn.stats()["events_sent"] == 1


def test_thunderagent_takes_every_hint_we_can_think_of(thunderagent):
    url, _ = thunderagent
    for name, hints in HINTS.items():
        body, headers = DIALECTS["thunderagent"].fields(hints)
        answer = chat(url, body, headers)
        assert answer.status_code == 200, (name, answer.text)
    assert {hints.program_id for hints in HINTS.values()} == set(httpx.get(f"{url}/programs").json())


def test_thunderagent_is_left_clean_by_programs_that_never_ended(thunderagent):
    url, _ = thunderagent
    sojourn.init(url, dialect="thunderagent")
    program = sojourn.program(id="left open").make().start()
    body, headers = sojourn.request_parts(program)
    assert chat(url, body, headers).status_code == 200
    assert "left open" in httpx.get(f"{url}/programs").json()
    sojourn.shutdown()
    assert httpx.get(f"{url}/programs").json() == {}
    program.end()


# ---- vLLM Router

ONE_AT_A_TIME = {"max_active_programs_per_target": 1}


@pytest.fixture(params=[{}], ids=["defaults"])
def vllm_router(request, tmp_path):
    python = interpreter("PEER_VLLM_ROUTER", "vllm_router")
    with Backend() as backend:
        port, prometheus = free_port(), free_port()
        url = f"http://127.0.0.1:{port}"
        command = [python, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-urls", backend.url, "--policy", "consistent_hash"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus)]
        command += ["--enable-program-scheduling", "--program-scheduling-config-json"]
        command += [json.dumps(request.param)]
        with running(command, url, "/scheduling/diagnostics", tmp_path / "log"):
            deadline_s = time.monotonic() + 30
            while chat(url).status_code != 200:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            backend.bodies.clear()
            yield url, backend


def programs_of(url):
    ranks = httpx.get(f"{url}/scheduling/diagnostics").json()["ranks"]
    return [program for rank in ranks for program in rank["programs"]]


def test_vllm_router_schedules_the_program_and_passes_the_context_on(vllm_router):
    url, backend = vllm_router
    sojourn.init(url, probe_timeout_s=10)
    assert sojourn.stats().dialect == "vllm_router"  # recognised, not told
    with sojourn.program(id="p-1", priority=5, kv_retention_ttl_s=4.0):
        answer = ask(url)
        assert answer.status_code == 200, answer.text
    assert len(programs_of(url)) == 1
    passed_on = backend.bodies[-1]["vllm_xargs"]["agentic_context"]
    assert json.loads(passed_on)["program_id"] == "p-1"  # a string: what vLLM accepts there
    with sojourn.program(id="p-2", parent="p-1", blocks_parent=True):
        assert ask(url).status_code == 200
    assert {program["root_program_id"] for program in programs_of(url)} == {"p-1"}


def test_vllm_router_takes_every_hint_we_can_think_of(vllm_router):
    url, backend = vllm_router
    for name, hints in HINTS.items():
        body, headers = DIALECTS["vllm_router"].fields(hints)
        answer = chat(url, body, headers)
        assert answer.status_code == 200, (name, answer.text)
    assert len(backend.bodies) == len(HINTS)
    identified = [hints for hints in HINTS.values() if not (hints.sojourn and hints.sojourn.implicit)]
    assert len(programs_of(url)) == len(identified)


@pytest.mark.parametrize("vllm_router", [ONE_AT_A_TIME], indirect=True, ids=["one at a time"])
@pytest.mark.parametrize("deadline_s", [0.0, 0.3, None])
def test_vllm_router_gives_no_request_up_whose_deadline_passes_in_its_queue(vllm_router, deadline_s):
    """No hint of ours may fail a request; this one could be read that way."""
    url, backend = vllm_router
    backend.delay_s = 1.0
    busy = DIALECTS["vllm_router"].fields(AgenticContext(program_id="busy"))
    waiting = DIALECTS["vllm_router"].fields(AgenticContext(program_id="p", deadline_seconds=deadline_s))
    first = threading.Thread(target=chat, args=(url, *busy))
    first.start()
    time.sleep(0.3)
    assert chat(url, *waiting).status_code == 200
    first.join()


@pytest.mark.parametrize(
    "context",
    [
        {"program_id": "p", "step_id": "7"},
        {"program_id": "p", "blocks_parent": True},
        {"program_id": "p", "parent_program_id": "p"},
        {"program_id": " "},
        {"program_id": "p", "deadline_seconds": 1e300},
    ],
)
def test_vllm_router_is_as_strict_as_we_think(vllm_router, context):
    """Else the tests above would prove nothing."""
    answer = chat(vllm_router[0], {"vllm_xargs": {"agentic_context": json.dumps(context)}})
    assert answer.status_code == 400


# ---- Dynamo: its frontend, its mock engine, its trace


@pytest.fixture(scope="module")
def dynamo(tmp_path_factory):
    python = interpreter("PEER_DYNAMO", "dynamo")
    pytest.importorskip("zmq", reason="pyzmq is not installed here: pip install 'sojourn[dynamo]'")
    from sojourn_server.models.model_cache import resolve_model  # a tokenizer is all it takes of it

    home = tmp_path_factory.mktemp("dynamo")
    port, events_port = free_port(), free_port()
    url, endpoint = f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{events_port}"
    trace = home / "trace.jsonl"
    discovery = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(home / "kv"), "HF_HUB_OFFLINE": "1"}
    tracing = {
        "DYN_REQUEST_TRACE": "1",
        "DYN_REQUEST_TRACE_SINKS": "file",
        "DYN_REQUEST_TRACE_FILE_FORMAT": "jsonl",
        "DYN_REQUEST_TRACE_FILE_PATH": str(trace),
        "DYN_REQUEST_TRACE_FILE_FLUSH_INTERVAL_MS": "100",
        "DYN_REQUEST_TRACE_TOOL_EVENTS_ZMQ_ENDPOINT": endpoint,
    }
    frontend = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    mocker = [
        python,
        "-m",
        "dynamo.mocker",
        "--model-path",
        resolve_model("tiny", progress=False),
        "--model-name",
        "m",
    ]
    mocker += ["--speedup-ratio", "100"]
    with (
        running(frontend, url, "/live", home / "frontend.log", {**discovery, **tracing}),
        running(mocker, url, "/v1/models", home / "mocker.log", discovery),
    ):
        deadline_s = time.monotonic() + 60
        while chat(url).status_code != 200:
            assert time.monotonic() < deadline_s, (home / "mocker.log").read_text(errors="replace")[-3000:]
            time.sleep(0.1)
        yield url, endpoint, trace


def traced(trace, enough, timeout_s=15):
    """The trace's records, once ``enough`` of them says so."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        lines = trace.read_text().splitlines() if trace.exists() else []
        records = [json.loads(line)["event"] for line in lines]
        if enough(records) or time.monotonic() > deadline_s:
            return records
        time.sleep(0.1)


def test_dynamo_traces_our_sessions_and_tool_calls_as_one(dynamo):
    url, endpoint, trace = dynamo
    sojourn.init(url, tool_events=endpoint, probe_timeout_s=10)
    assert sojourn.stats().dialect == "dynamo"  # recognised, not told
    with sojourn.program(id="boss"), sojourn.program(id="агент", priority=7, expected_output_length=9):
        answer = ask(url)
        assert answer.status_code == 200, answer.text
        with sojourn.tool_call("bash", "call-ok", tool_class="pytest"):
            pass
        for call_id, status in (
            ("call-error", "nonzero"),
            ("call-late", "timeout"),
            ("call-off", "cancelled"),
        ):
            call = sojourn.tool_call("bash", call_id).start()
            call.stop(status)
    assert sojourn.flush(5)
    session = DIALECTS["dynamo"].fields(AgenticContext(program_id="агент"))[1]["X-Dynamo-Session-ID"]
    records = traced(trace, lambda found: sum("tool" in record for record in found) >= 8)
    ours = [record for record in records if record.get("agent_context", {}).get("session_id") == session]
    assert {record["agent_context"]["parent_session_id"] for record in ours} == {"boss"}
    assert [record["event_type"] for record in ours].count("request_end") == 1
    ends = {
        record["tool"]["tool_call_id"]: (
            record["event_type"],
            record["tool"]["status"],
            record["tool"]["tool_class"],
        )
        for record in ours
        if record["event_type"] in ("tool_end", "tool_error")
    }
    assert ends == {
        "call-ok": ("tool_end", "succeeded", "pytest"),
        "call-error": ("tool_error", "error", "bash"),
        "call-late": ("tool_error", "cancelled", "bash"),
        "call-off": ("tool_end", "cancelled", "bash"),
    }
    assert sojourn.stats()["events_sent"] == 8


def test_dynamo_takes_every_hint_we_can_think_of(dynamo):
    url, _, _ = dynamo
    for name, hints in HINTS.items():
        body, headers = DIALECTS["dynamo"].fields(hints)
        answer = chat(url, body, headers)
        assert answer.status_code == 200, (name, answer.text)


@pytest.mark.parametrize(
    "body",
    [
        {"nvext": {"agent_hints": {"ttl": 3}}},
        {"nvext": {"agent_hints": {"priority": 2**40}}},
        {"nvext": {"agent_hints": {"osl": -1}}},
        {"vllm_xargs": {"agentic_context": "{}"}},
        {"program_id": "p"},
        {"session_id": "p"},
    ],
)
def test_dynamo_is_as_strict_as_we_think(dynamo, body):
    """Else the tests above would prove nothing."""
    assert chat(dynamo[0], body).status_code == 400
