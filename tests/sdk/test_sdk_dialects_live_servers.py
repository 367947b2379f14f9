"""Real servers of other projects, in front of a small backend, accept what each dialect sends.

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
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import sojourn
from json_server import JsonServer
from sojourn.dialects import DIALECTS
from sojourn.hints import AgenticContext, SojournContext
from waiting import wait_until

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


def vllm_backend():
    """A server that looks like vLLM to a router."""
    model = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 4096}
    pages = {"/health": b"", "/metrics": METRICS, "/v1/models": {"object": "list", "data": [model]}}
    message = {"role": "assistant", "content": "hi"}
    answer = {
        "id": "x", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }  # fmt: skip
    return JsonServer(pages, answer)


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
            tail = lambda: Path(log).read_text(errors="replace")[-3000:]  # noqa: E731
            wait_until(lambda: process.poll() is not None or _answers(url + path), tail, 60)
            assert process.poll() is None, tail()
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
    with vllm_backend() as backend:
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
    assert sojourn.flush(60)
    assert httpx.get(f"{url}/programs").json() == {}
    assert all("program_id" not in body for body in backend.bodies)  # it keeps the id to itself
    assert sojourn.stats()["events_sent"] == 1


def test_thunderagent_accepts_every_hint(thunderagent):
    url, _ = thunderagent
    for name, hints in HINTS.items():
        body, headers = DIALECTS["thunderagent"].fields(hints)
        answer = chat(url, body, headers)
        assert answer.status_code == 200, (name, answer.text)
    assert {hints.program_id for hints in HINTS.values()} == set(httpx.get(f"{url}/programs").json())


def test_open_programs_are_released_from_thunderagent_at_exit(thunderagent):
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
    with vllm_backend() as backend:
        port, prometheus = free_port(), free_port()
        url = f"http://127.0.0.1:{port}"
        command = [python, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--worker-urls", backend.url, "--policy", "consistent_hash"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus)]
        command += ["--enable-program-scheduling", "--program-scheduling-config-json"]
        command += [json.dumps(request.param)]
        with running(command, url, "/scheduling/diagnostics", tmp_path / "log"):
            wait_until(lambda: chat(url).status_code == 200)
            backend.posts.clear()
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


def test_vllm_router_accepts_every_hint(vllm_router):
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
def test_vllm_router_serves_a_request_whose_deadline_passed_in_its_queue(vllm_router, deadline_s):
    """No hint of ours may fail a request; this one could be read that way."""
    url, backend = vllm_router
    backend.delay_s = 1.0
    busy = DIALECTS["vllm_router"].fields(AgenticContext(program_id="busy"))
    waiting = DIALECTS["vllm_router"].fields(AgenticContext(program_id="p", deadline_seconds=deadline_s))
    first = threading.Thread(target=chat, args=(url, *busy))
    first.start()
    wait_until(lambda: backend.posts)
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
def test_vllm_router_refuses_what_the_dialect_leaves_out(vllm_router, context):
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
        log = home / "mocker.log"
        wait_until(lambda: chat(url).status_code == 200, lambda: log.read_text(errors="replace")[-3000:], 60)
        yield url, endpoint, trace


def traced(trace, enough):
    """Return the trace's records once ``enough`` of them accepts them."""

    def records():
        lines = trace.read_text().splitlines() if trace.exists() else []
        found = [json.loads(line)["event"] for line in lines]
        return found if enough(found) else None

    return wait_until(records)


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
    assert sojourn.flush(60)
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


def test_dynamo_accepts_every_hint(dynamo):
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
def test_dynamo_refuses_what_the_dialect_leaves_out(dynamo, body):
    """Else the tests above would prove nothing."""
    assert chat(dynamo[0], body).status_code == 400
