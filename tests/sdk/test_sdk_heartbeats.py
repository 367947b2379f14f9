"""When heartbeats are due, and which programs send them."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import sojourn
from sdk_records import told
from sdk_settings import resolve_with
from sojourn import event_sender
from sojourn.config import Config
from sojourn.heartbeats import Heartbeats
from sojourn.ids import ProgramId
from sojourn.program import Program
from sojourn.testing import FakeServer
from sojourn.wire_events import Heartbeat, ProgramEnd, ProgramStart
from sojourn_server.core.leases import SILENCE_S
from waiting import wait_until


@pytest.mark.parametrize(
    "looks",
    [
        "100-3 102.5-0.5 103!3 103.1-2.9 110!3",  # one interval after the start, then one after each beat
        # With nothing but open requests (r), every second one. The server may not see the request: it waits
        # for a connection or Retry-After, or a replica has it. A tool (t) that runs meanwhile brings all.
        "103r-3 106r!3 109r-3 112rt!3 115rt!3 118!3 121r-3 124r!3",
    ],
)
def test_when_a_program_beats(looks):
    """A look is time, what is open, whether a beat is due (!), and the wait until the next one."""
    beats, program = Heartbeats(3.0), Program(ProgramId("p"))
    beats.opened(program, 100.0)
    for time_s, state, due, wait_s in re.findall(r"([\d.]+)([rt]*)([-!])([\d.]+)", looks):
        program.open_requests = {object()} if "r" in state else set()
        program.running_tools = {"c"} if "t" in state else set()
        found = beats.take_due(float(time_s))
        assert found == ([program] if due == "!" else [], pytest.approx(float(wait_s))), time_s


def test_no_silence_of_an_open_program_is_as_long_as_the_server_allows():
    config = Config.resolve("http://x")
    beats = Heartbeats(config.heartbeat_s)
    program = Program(ProgramId("p"))
    program.open_requests.add(object())
    beats.opened(program, 0.0)
    now_s, heard_s = 0.0, [0.0]
    while now_s < 60:
        due, wait_s = beats.take_due(now_s)
        heard_s += [now_s] if due else []
        now_s += wait_s
        if len(heard_s) % 3 == 2:
            program.running_tools.add("c")
        else:
            program.running_tools.clear()
    gaps_s = [after - before for before, after in pairwise(heard_s)]
    # One batch may take as long as the SDK waits for its answer.
    assert max(gaps_s) + config.send_timeout_s < SILENCE_S


def test_a_program_that_ended_or_was_let_go_falls_silent_and_no_other_of_its_id():
    beats = Heartbeats(3.0)
    first, second = Program(ProgramId("conv")), Program(ProgramId("conv"))
    for program in (first, second, Program(ProgramId("gone"))):
        beats.opened(program, 1.0)
    beats.closed(first)
    del program
    assert beats.take_due(4.0) == ([second], 3.0)
    beats.closed(second)
    assert beats.take_due(7.0) == ([], None)


def test_a_running_agent_sends_heartbeats_and_a_quiet_one_none(server, monkeypatch):
    monkeypatch.setattr(Config, "resolve", resolve_with(heartbeat_s=0.05))
    sojourn.init(server.url)
    with sojourn.program("p") as p, sojourn.tool_call("sleep"):
        events = server.wait_for_events(5, 30)
        assert {e.program_id for e in events} == {p.id}
        assert sum(isinstance(e, Heartbeat) for e in events) >= 3
        assert [e.seq for e in events] == list(range(len(events)))
        with sojourn.program("quiet", heartbeat=False) as quiet:
            server.wait_for_events(len(server.events()) + 4, 30)
    assert [type(e) for e in told(server) if e.program_id == quiet.id] == [ProgramStart, ProgramEnd]


def beating():
    session = sojourn.runtime.session()
    return session.heartbeats.take_due(sojourn.runtime.clock() + 100)[0]


def test_programs_that_are_open_beat_in_the_next_session_too(server):
    """``init()`` again in a notebook, or in a library that a running program uses."""
    with FakeServer() as second, sojourn.program("early", agent_type="a", tenant="t") as p:
        sojourn.init(server.url)
        assert beating() == [p]
        with sojourn.program("mute", heartbeat=False), sojourn.program("inner") as q:
            sojourn.init(second.url)
            assert beating() == [p, q]
        sojourn.shutdown()
        sojourn.init(second.url)
        assert beating() == [p]
        assert sojourn.flush(60)
    starts = [e for e in server.program_events() if isinstance(e, ProgramStart)]
    assert [e.name for e in starts] == ["early", "mute", "inner"], "the server was not told of the first"
    assert (starts[0].agent_type, starts[0].tenant, starts[0].heartbeat) == ("a", "t", True)
    again = [(e.name, e.program_id) for e in second.program_events() if isinstance(e, ProgramStart)]
    assert sorted(again) == [("early", p.id), ("early", p.id), ("inner", q.id)]


def test_resumed_heartbeats_wake_the_sleeping_sender(server, monkeypatch):
    """A conversation of OpenAI Agents goes on after a pause, and its run emits no event."""
    looks = []
    take_due = Heartbeats.take_due

    def recorded(self, now):
        looks.append(take_due(self, now))
        return looks[-1]

    monkeypatch.setattr(Heartbeats, "take_due", recorded)
    monkeypatch.setattr(event_sender, "_POLLS", 0)
    monkeypatch.setattr(Config, "resolve", resolve_with(heartbeat_s=0.05))
    sojourn.init(server.url)
    sender = sojourn.runtime.session().event_sender
    with sojourn.program("waits") as p:
        p.pause_heartbeats()
        assert sojourn.flush(60)
        wait_until(lambda: looks[-1][1] is None and sender._idle)
        server.forget()
        p.resume_heartbeats()
        assert isinstance(server.wait_for_events(1, 30)[0], Heartbeat)
