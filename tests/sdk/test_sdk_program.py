"""Programs: their life, their family, and all the ways to open one."""

from __future__ import annotations

import asyncio
import gc

import pytest
import sojourn
from sdk_records import context_of, told
from sojourn import runtime
from sojourn.outgoing_request import LogicalRequest
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart, ToolStop

WRONG = {
    "id": ("", "x" * 257, "é" * 129, "\ud800", 7),
    "parent": ("", 7),
    "priority": ("high", True, 2**63),
    "deadline_s": (-1, float("inf")),
    "kv_retention_ttl_s": (float("nan"),),
    "expected_output_length": (-5,),
    "blocks_parent": ("yes",),
    "max_steps": (-1, float("nan"), 10**400, "9"),
    "tenant": (5,),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_wrong_arguments_raise_before_anything_runs(name, value):
    with pytest.raises(sojourn.ArgumentError, match=name):
        sojourn.program("p", **{name: value})


def test_an_abandoned_generator_ends_its_program_as_cancelled(online):
    @sojourn.program
    def endless():
        while True:
            yield

    @sojourn.program
    async def async_endless():
        while True:
            yield sojourn.tool(endless)()

    async def leave_early():
        async for tool in async_endless():
            next(tool)
            break
        assert sojourn.current_program() is None

    for _ in endless():
        break
    asyncio.run(leave_early())  # which closes the generator in a context of the loop
    gc.collect()
    assert [end.status for end in told(online, ProgramEnd)] == ["cancelled"] * 3
    assert sojourn.stats()["context_reset_failed"] == 0


def test_requests_outside_any_program_belong_to_a_flagged_one_of_the_process(online):
    body, headers = sojourn.request_parts()
    assert headers == sojourn.headers()
    assert context_of(body).sojourn.implicit
    with sojourn.program() as p:
        assert p.parent_id is None
        assert sojourn.headers()["X-Session-ID"] == p.id != headers["X-Session-ID"]
    with sojourn.tool_call("t"):
        assert sojourn.current_program() is None
        with sojourn.program() as q:
            assert q.parent_id is None
    sojourn.shutdown()
    assert {e.program_id for e in online.events()} == {p.id, q.id}, "the server has no such program"


def test_a_process_of_one_loop_is_one_program_until_its_code_opens_one(server, monkeypatch):
    monkeypatch.setenv("SOJOURN_OWN_PROGRAM", "1")
    monkeypatch.setattr("sys.argv", ["/home/me/my_agent.py", "--task", "secret"])
    sojourn.init(server.url)
    with sojourn.tool_call("set-up"):
        pass
    first, second = context_of(), context_of()
    assert first.program_id == second.program_id
    assert not second.sojourn.implicit
    assert second.sojourn.heartbeat
    with sojourn.program() as p:
        pass
    assert context_of().sojourn.implicit
    sojourn.shutdown()
    kinds = [ProgramStart, ToolStart, ToolStop, ProgramEnd]
    events = {type(e): e for e in server.events() if e.program_id == first.program_id}
    assert list(events) == kinds
    assert events[ProgramStart].name == "my_agent.py"
    assert events[ProgramEnd].status == "cancelled", "its length is no whole run's and must not be learned"
    assert [type(e) for e in server.events() if e.program_id == p.id] == [ProgramStart, ProgramEnd]


def test_the_processs_own_program_ends_after_its_requests(server, monkeypatch):
    """SGLang and ThunderAgent end the session of a running request with its program."""
    monkeypatch.setenv("SOJOURN_OWN_PROGRAM", "1")
    sojourn.init(server.url)
    context_of()  # a request
    session = runtime.session()
    own = session.program
    first, second = (LogicalRequest(session.counters, own) for _ in range(2))
    assert context_of().sojourn.implicit
    first.end()
    assert own.is_open
    second.end()
    assert not own.is_open
    assert told(server)[-1].status == "cancelled"
