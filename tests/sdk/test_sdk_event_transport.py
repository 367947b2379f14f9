"""Events to servers without the sojourn plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
import sojourn
from json_server import JsonServer
from sojourn import lifecycle
from sojourn.dialects import DIALECTS, DeliveryResult, PendingBatch, TransportContext
from sojourn.dialects.dynamo import TraceRecordEncoder
from sojourn.dialects.end_notifier import MAX_PROGRAMS, EndNotifier
from sojourn.event_queue import PendingEvent
from sojourn.event_sender import EventSender
from sojourn.http_transport import HttpResponse
from sojourn.stats import Counters
from sojourn.testing import refusing_url
from sojourn.wire_events import Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop
from waiting import wait_until

FAREWELLS = {
    "thunderagent": ("/programs/release", "program_id"),
    "sglang": ("/close_session", "session_id"),
}


@pytest.mark.parametrize("name", FAREWELLS)
def test_only_the_end_of_a_program_is_sent(name):
    path, field = FAREWELLS[name]
    with JsonServer() as peer:
        sojourn.init(peer.url, dialect=name, api_key="key")
        with sojourn.program(id="прог"), sojourn.tool_call("bash"):
            pass
        assert sojourn.flush(60)
        assert peer.posts == [(path, {field: "прог"}, "Bearer key")]
        stats = sojourn.stats()
        assert stats["events_sent"] == 1
        assert stats["dropped_unsupported"] == 3  # the start is only remembered; the tool's two not even that


@pytest.mark.parametrize("name", FAREWELLS)
def test_programs_still_open_are_released_at_the_close(name):
    with JsonServer() as peer:
        sojourn.init(peer.url, dialect=name)
        left_open = sojourn.program(id="left open").make().start()
        with sojourn.program(id="done"):
            pass
        sojourn.shutdown()
        assert peer.bodies == [{FAREWELLS[name][1]: id} for id in ("done", "left open")]
        left_open.end()


@pytest.mark.parametrize("name", FAREWELLS)
@pytest.mark.parametrize("heartbeat", [True, False])
def test_a_second_init_releases_no_open_program(name, heartbeat):
    field = FAREWELLS[name][1]
    with JsonServer() as peer:
        sojourn.init(peer.url, dialect=name)
        with sojourn.program(id="left open", heartbeat=heartbeat):
            with sojourn.program(id="ends later", heartbeat=heartbeat):
                assert sojourn.flush(60)
                sojourn.init(peer.url, dialect=name, hosts=["10.0.0.9:8000"])
                assert peer.bodies == []
            assert sojourn.flush(60)
            assert peer.bodies == [{field: "ends later"}]
            sojourn.shutdown()
            assert peer.bodies == [{field: "ends later"}, {field: "left open"}]


@pytest.mark.parametrize("inits", [1, 2])
def test_programs_are_released_although_the_server_was_not_recognised_again(inits):
    """The server answers 404 to the probe of a later ``init()``, as during a rolling restart."""
    pages = {"/v1/models": {"data": [{"owned_by": "sglang"}]}}
    with JsonServer(pages) as peer, sojourn.program(id="p"):
        sojourn.init(peer.url, probe_timeout_s=30)
        assert sojourn.stats().dialect == "sglang"
        assert sojourn.flush(60)
        peer.pages = {}
        for n in range(inits):
            sojourn.init(peer.url, probe_timeout_s=30, hosts=[f"10.0.0.{n}:8000"])
            assert sojourn.stats().dialect == "vllm"
        assert peer.bodies == []
        sojourn.shutdown()
        assert peer.bodies == [{"session_id": "p"}]


@pytest.mark.parametrize("name", FAREWELLS)
def test_a_server_that_another_one_replaces_keeps_no_program(name):
    field = FAREWELLS[name][1]
    with JsonServer() as peer, JsonServer() as second, sojourn.program(id="p"):
        sojourn.init(peer.url, dialect=name)
        assert sojourn.flush(60)
        sojourn.init(second.url, dialect=name)
        assert peer.bodies == [{field: "p"}]
        assert sojourn.flush(60)
        sojourn.shutdown()
        assert second.bodies == [{field: "p"}]


def test_an_init_that_fails_leaves_the_ends_to_the_session_that_stays(monkeypatch):
    with JsonServer() as peer, sojourn.program(id="p"):
        sojourn.init(peer.url, dialect="sglang")
        assert sojourn.flush(60)
        monkeypatch.setattr(EventSender, "start", lambda self: 1 / 0)
        with pytest.raises(sojourn.ConfigError):
            sojourn.init(peer.url, dialect="sglang", hosts=["10.0.0.9:8000"])
        sojourn.shutdown()
        assert peer.bodies == [{"session_id": "p"}]


@pytest.mark.parametrize("error", [OSError, sojourn.ConfigError])
def test_an_init_that_fails_late_leaves_no_thread_and_reports_no_end(monkeypatch, error):
    """It fails after its event sender has started."""
    with JsonServer() as peer, sojourn.program(id="p"):
        sojourn.init(peer.url, dialect="sglang")
        assert sojourn.flush(60)
        threads = set(threading.enumerate())

        def fail(session, config):
            late.extend(set(threading.enumerate()) - threads)
            raise error("late")

        late = []
        monkeypatch.setattr(lifecycle, "_start_learning", fail)
        with pytest.raises(sojourn.ConfigError, match="late"):
            sojourn.init(peer.url, dialect="sglang", hosts=["10.0.0.9:8000"])
        (sender,) = (each for each in late if each.name == "sojourn-event-sender")
        sender.join(60)
        assert not sender.is_alive()
        assert peer.bodies == []
        sojourn.shutdown()
        assert peer.bodies == [{"session_id": "p"}]


def test_thunderagent_is_told_the_end_of_an_implicit_program_too():
    with JsonServer() as peer:
        sojourn.init(peer.url, dialect="thunderagent")
        fields = sojourn.request_fields()
        sojourn.shutdown()
        assert peer.posts == [("/programs/release", fields, None)]


def test_sglang_knows_no_implicit_program():
    with JsonServer() as peer:
        sojourn.init(peer.url, dialect="sglang")
        assert sojourn.request_fields() == {}
        sojourn.shutdown()
        assert peer.posts == []


def test_atexit_releases_too(python):
    with JsonServer() as peer:
        python(
            f"""
            import sojourn
            sojourn.init({peer.url!r}, dialect="thunderagent")
            sojourn.program(id="never ended").make().start()
            """
        )
        assert peer.bodies == [{"program_id": "never ended"}]


def test_a_child_does_not_release_its_parents_programs(python):
    with JsonServer() as peer:
        python(
            f"""
            import os, sojourn
            sojourn.init({peer.url!r}, dialect="thunderagent")
            with sojourn.program(id="parent's"):
                sojourn.flush(5)
                pid = os.fork()
                if pid == 0:
                    with sojourn.program(id="child's"):
                        pass
                    sojourn.shutdown()
                    os._exit(0)
                os.waitpid(pid, 0)
            """
        )
        assert [body["program_id"] for body in peer.bodies] == ["child's", "parent's"]


class Script:
    """A transport that answers from a list, then 200."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.posts = []

    def post(self, path, body):
        self.posts.append(json.loads(body))
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        return HttpResponse(answer, b"")


def batch(*events):
    pendings = [PendingEvent(id, kind, seq, 0.0, {}) for seq, (id, kind) in enumerate(events)]
    return PendingBatch("e", pendings, 1.0)


def test_a_farewell_that_failed_is_tried_again_with_the_next():
    script, counters = Script(500, 500), Counters()
    event_transport = EndNotifier(TransportContext(script, counters), "/x", "id")
    assert event_transport.deliver(batch(("a", ProgramEnd), ("b", ProgramEnd))) is DeliveryResult.FAILED
    assert counters["dropped_send"] == 2
    assert counters["http_500"] == 1  # a server that fails is not asked twice in a row
    assert event_transport.deliver(batch(("c", ProgramStart))) is DeliveryResult.FAILED
    assert event_transport.deliver(batch(("c", ProgramEnd))) is DeliveryResult.ACCEPTED
    assert [post["id"] for post in script.posts[2:]] == ["a", "b", "c"]
    assert counters["events_sent"] == 1
    assert counters["dropped_unsupported"] == 1


@pytest.mark.parametrize("status", [400, 422, 500])
def test_a_farewell_that_is_never_taken_does_not_keep_the_others_waiting(status):
    """It is one program the server stumbles over, and it does so each time."""
    counters = Counters()
    posts = []

    class Picky:
        def post(self, path, body):
            posts.append(json.loads(body)["id"])
            return HttpResponse(status if posts[-1] == "bad" else 200, b"")

    event_transport = EndNotifier(TransportContext(Picky(), counters), "/x", "id")
    for id in ("bad", "a", "b", "c"):
        event_transport.deliver(batch((id, ProgramEnd)))
    event_transport.close()
    assert {"a", "b", "c"} <= set(posts)
    if status != 500:
        assert posts == ["bad", "a", "b", "c"]
        assert counters["events_sent"] == 3
        assert counters["dropped_send"] == 1


def test_a_server_without_the_endpoint_is_left_alone():
    with JsonServer() as peer:
        peer.status = 404
        sojourn.init(peer.url, dialect="thunderagent")
        for _ in range(3):
            with sojourn.program():
                pass
            sojourn.flush(5)
        sojourn.shutdown()
        assert len(peer.posts) == 1


def test_the_close_of_a_courier_stops_at_the_first_failure():
    script, counters = Script(OSError("gone")), Counters()
    event_transport = EndNotifier(TransportContext(script, counters), "/x", "id")
    event_transport.deliver(batch(*((f"p{n}", ProgramStart) for n in range(100))))
    event_transport.close()
    assert len(script.posts) == 1


def test_what_an_end_notifier_remembers_is_bounded():
    script, counters = Script(*[500] * 10**5), Counters()
    event_transport = EndNotifier(TransportContext(script, counters), "/x", "id")
    event_transport.deliver(batch(*((f"p{n}", ProgramStart) for n in range(MAX_PROGRAMS + 50))))
    assert len(event_transport._open) == MAX_PROGRAMS
    event_transport.deliver(batch(*((f"p{n}", ProgramEnd) for n in range(MAX_PROGRAMS + 50))))
    assert len(event_transport._unreported) == MAX_PROGRAMS
    records = TraceRecordEncoder()
    for n in range(10_000):
        records.record(PendingEvent(f"p{n}", ProgramStart, n, 0.0, {"parent_program_id": "x"}), 0.0)
        records.record(PendingEvent("p", ToolStart, n, 0.0, {"call_id": f"c{n}", "tool": "t"}), 0.0)
    assert len(records._parents) == len(records._classes) == 4096


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "sojourn"])
def test_no_dialect_makes_an_agent_wait_for_a_dead_server(name, monkeypatch):
    """The server never answers, so an agent that waited for it would hang."""
    sender, callers, answered = "sojourn-event-sender", set(), threading.Event()
    url = refusing_url()

    def hang(self, *request):
        if self._headers["host"] != url.removeprefix("http://"):
            raise OSError("the sender of an earlier test")
        callers.add(threading.current_thread().name)
        if callers == {sender}:
            answered.wait()
        raise OSError("no answer")

    for method in ("get", "post"):
        monkeypatch.setattr(sojourn.http_transport.HttpTransport, method, hang)
    sojourn.init(url, dialect=name)
    try:
        for n in range(500):
            with sojourn.program(f"p{n}"), sojourn.tool_call("bash"):
                sojourn.request_parts()
        if name in FAREWELLS:
            wait_until(lambda: callers)
        sojourn.shutdown()
        assert callers == ({sender} if name in FAREWELLS else set())
    finally:
        answered.set()


@pytest.mark.parametrize("name", ["vllm", "vllm_priority", "vllm_router", "llm_d", "aibrix", "dynamo"])
def test_servers_without_events_get_none(name):
    with JsonServer() as peer:
        sojourn.init(peer.url, dialect=name)
        with sojourn.program(), sojourn.tool_call("bash"):
            pass
        assert sojourn.flush(60)
        assert peer.posts == []
        assert sojourn.stats()["dropped_unsupported"] == 4


def test_a_peer_that_came_up_late_is_recognised_by_its_refusal(monkeypatch):
    """The probe met nobody; the first events then meet ThunderAgent, which has no place for them."""
    with JsonServer() as peer:
        pages = {"/health": {"router_mode": "tr", "scheduling_enabled": True, "programs_count": 0}}
        real_get = sojourn.http_transport.HttpTransport.get
        asked = []

        def get(self, path, timeout_s):
            asked.append(path)
            if len(asked) == 1:
                raise OSError("not up yet")
            return real_get(self, path, timeout_s)

        monkeypatch.setattr(sojourn.http_transport.HttpTransport, "get", get)
        peer.pages, peer.status = pages, 404
        sojourn.init(peer.url)
        assert sojourn.stats().dialect_known is False
        with sojourn.program(id="first"):
            pass
        sojourn.flush(5)
        assert (sojourn.stats().dialect, sojourn.stats().dialect_known) == ("thunderagent", True)
        peer.status = 200
        with sojourn.program(id="second"):
            assert sojourn.request_fields() == {"program_id": "second"}
        assert sojourn.flush(60)
        assert peer.posts[-1][:2] == ("/programs/release", {"program_id": "second"})


# ---- Dynamo's records


def record(kind, now=0.0, at_s=0.0, records=None, program_id="p", **fields):
    records = TraceRecordEncoder(lambda: 1000.0) if records is None else records
    return records.record(PendingEvent(program_id, kind, 0, at_s, fields), now)


def test_a_tool_call_becomes_a_start_and_an_end():
    records = TraceRecordEncoder(lambda: 1000.0)
    assert record(ProgramStart, records=records, parent_program_id="boss") is None
    start = record(ToolStart, 5.0, 3.0, records, call_id="c", tool="bash", tool_class="pytest")
    who = {"session_id": "p", "parent_session_id": "boss"}
    assert start == {
        "schema": "dynamo.request.trace.v1",
        "event_type": "tool_start",
        "event_time_unix_ms": 998_000,
        "event_source": "harness",
        "agent_context": who,
        **who,
        "tool": {
            "tool_call_id": "c",
            "tool_class": "pytest",
            "status": "running",
            "started_at_unix_ms": 998_000,
        },
    }
    stop = record(ToolStop, 5.0, 4.5, records, call_id="c", duration_s=1.5, status="ok")
    assert stop["event_type"] == "tool_end"
    assert stop["tool"] == {
        "tool_call_id": "c",
        "tool_class": "pytest",
        "status": "succeeded",
        "started_at_unix_ms": 998_000,
        "ended_at_unix_ms": 999_500,
        "duration_ms": 1500.0,
    }
    assert record(ProgramEnd, records=records) is None
    assert "parent_session_id" not in record(ToolStart, records=records, call_id="d", tool="t")


@pytest.mark.parametrize(
    ("status", "event_type", "told", "error_type"),
    [
        ("ok", "tool_end", "succeeded", None),
        ("cancelled", "tool_end", "cancelled", None),
        ("error", "tool_error", "error", "error"),
        ("nonzero", "tool_error", "error", "nonzero"),
        ("timeout", "tool_error", "cancelled", "timeout"),
    ],
)
def test_an_end_without_its_start_stands_alone(status, event_type, told, error_type):
    said = record(ToolStop, call_id="c", duration_s=0.25, status=status)
    assert said["event_type"] == event_type
    assert said["tool"]["status"] == told
    assert said["tool"].get("error_type") == error_type
    assert said["tool"]["tool_class"] == "unknown"
    assert said["tool"]["duration_ms"] == 250.0


def test_records_name_a_session_as_the_headers_do():
    said = record(ToolStart, program_id="агент", call_id="c", tool="t")
    _, headers = DIALECTS["dynamo"].fields(sojourn.hints.AgenticContext(program_id="агент"))
    assert said["session_id"] == headers["X-Dynamo-Session-ID"]


def test_there_is_no_word_for_a_heartbeat():
    assert record(Heartbeat) is None


# ---- ZeroMQ


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(sojourn.ConfigError, match=r"\[dynamo\]"):
        sojourn.init("http://127.0.0.1:1", dialect="dynamo", tool_events="tcp://127.0.0.1:1")
    sojourn.init("http://127.0.0.1:1", dialect="dynamo")  # without tool events nothing is needed


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:20390", "tcp://*:20390", "tcp://h", "tcp://h:x", "tcp://h:99999", "ipc://"]
)
def test_an_endpoint_that_cannot_be_connected_is_refused(endpoint):
    with pytest.raises(sojourn.ConfigError, match="tool_events"):
        sojourn.init("http://127.0.0.1:1", dialect="dynamo", tool_events=endpoint)


def test_tool_events_are_for_dynamo_only():
    with pytest.raises(sojourn.ConfigError, match="'dynamo'"):
        sojourn.init("http://127.0.0.1:1", dialect="sglang", tool_events="tcp://127.0.0.1:20390")


@pytest.fixture
def pull():
    zmq = pytest.importorskip("zmq", reason="pyzmq is not installed here: pip install 'sojourn[dynamo]'")
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    yield socket, f"tcp://127.0.0.1:{port}"
    socket.close(0)
    context.term()


def test_tool_calls_arrive_as_three_frames(pull):
    import msgspec

    socket, endpoint = pull
    with JsonServer() as peer:
        sojourn.init(peer.url, dialect="dynamo", tool_events=endpoint)
        with sojourn.program(id="p"), sojourn.tool_call("bash", "c", tool_class="ls"):
            pass
        frames = [socket.recv_multipart() for _ in range(2)]
        assert sojourn.flush(60)
        assert [topic for topic, _, _ in frames] == [b"agent-tool-events"] * 2
        assert [int.from_bytes(seq, "big") for _, seq, _ in frames] == [0, 1]
        assert all(len(seq) == 8 for _, seq, _ in frames)
        start, end = [msgspec.msgpack.decode(data) for _, _, data in frames]
        assert (start["event_type"], end["event_type"]) == ("tool_start", "tool_end")
        assert end["tool"]["tool_class"] == "ls"
        assert abs(end["event_time_unix_ms"] / 1000 - time.time()) < 60
        assert sojourn.stats()["events_sent"] == 2
        assert peer.posts == []


def test_tool_calls_outside_a_program_arrive_too(pull):
    import msgspec

    socket, endpoint = pull
    sojourn.init(refusing_url(), dialect="dynamo", tool_events=endpoint)
    with sojourn.tool_call("bash", "c"):
        pass
    records = [msgspec.msgpack.decode(socket.recv_multipart()[2]) for _ in range(2)]
    assert [record["event_type"] for record in records] == ["tool_start", "tool_end"]


def test_the_environment_names_the_endpoint(pull, monkeypatch):
    socket, endpoint = pull
    monkeypatch.setenv("SOJOURN_TOOL_EVENTS", endpoint)
    sojourn.init(refusing_url(), dialect="dynamo")
    with sojourn.program(), sojourn.tool_call("bash"):
        pass
    assert len(socket.recv_multipart()) == 3


def test_a_fork_gets_a_socket_of_its_own(pull):
    socket, endpoint = pull
    code = f"""
import os, sojourn
sojourn.init("http://127.0.0.1:1", dialect="dynamo", tool_events={endpoint!r})
with sojourn.program(id="parent"), sojourn.tool_call("t", "a"):
    pass
assert sojourn.flush(60)
pid = os.fork()
if pid == 0:
    with sojourn.program(id="child"), sojourn.tool_call("t", "b"):
        pass
    sojourn.shutdown()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
with sojourn.program(id="parent"), sojourn.tool_call("t", "c"):
    pass
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SOJOURN_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, timeout=60, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    import msgspec

    told = [msgspec.msgpack.decode(socket.recv_multipart()[2]) for _ in range(6)]
    assert sorted((r["session_id"], r["tool"]["tool_call_id"], r["event_type"]) for r in told) == [
        ("child", "b", "tool_end"), ("child", "b", "tool_start"),
        ("parent", "a", "tool_end"), ("parent", "a", "tool_start"),
        ("parent", "c", "tool_end"), ("parent", "c", "tool_start"),
    ]  # fmt: skip


def test_without_a_frontend_zeromq_holds_some_events_and_the_rest_is_counted():
    pytest.importorskip("zmq", reason="pyzmq is not installed here: pip install 'sojourn[dynamo]'")
    sojourn.init(refusing_url(), dialect="dynamo", tool_events="tcp://127.0.0.1:9")
    with sojourn.program():
        for _ in range(1200):
            with sojourn.tool_call("bash"):
                pass
        sojourn.flush(5)
        stats = sojourn.stats()
        assert stats["net_Again"] >= 1
        assert stats["dropped_send"] > 0
        assert stats["events_sent"] <= 1100
    started_s = time.perf_counter()
    sojourn.shutdown()
    assert time.perf_counter() - started_s < 2.5
