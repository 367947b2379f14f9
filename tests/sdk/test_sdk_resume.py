"""A program that comes back under its id, in the same process or in another."""

from __future__ import annotations

import threading

import pytest
import sojourn
from sojourn import runtime
from sojourn.heartbeats import Heartbeats
from sojourn.ids import ProgramId
from sojourn.program import Program, process_program
from sojourn.wire_events import ProgramEnd, ProgramStart


def keys(server):
    """What a server tells doubles by."""
    return [
        (batch.emitter, event.program_id, event.seq)
        for batch in server.batches
        for event in [sojourn.wire_codec.decode_event(raw) for raw in batch.events]
    ]


def test_no_number_is_used_twice_when_a_program_is_resumed(online):
    for _ in range(2):
        with sojourn.program(id="conv"), sojourn.tool_call("t"):
            pass
    assert sojourn.flush(60)
    seen = keys(online)
    assert len(seen) == len(set(seen)) == 8
    of_program = [seq for _, _, seq in seen]
    assert of_program == sorted(of_program)


def test_closing_one_block_does_not_silence_another_of_the_same_id():
    beats = Heartbeats(3.0)
    first, second = Program(ProgramId("conv")), Program(ProgramId("conv"))
    beats.opened(first, 0.0)
    beats.opened(second, 0.0)
    beats.closed(first)
    assert beats.take_due(3.0) == ([second], 3.0)
    beats.closed(second)
    assert beats.take_due(6.0) == ([], None)


def test_threads_that_meet_agree_on_the_process_program(online, monkeypatch):
    import time

    made = Program.__init__

    def slowly(self, *args, **kwargs):
        time.sleep(0.02)
        made(self, *args, **kwargs)

    monkeypatch.setattr(Program, "__init__", slowly)
    runtime.session().counts_as_one_run = True  # an implicit program sends no start
    barrier = threading.Barrier(8)
    found = []

    def ask():
        barrier.wait(5)
        found.append(process_program(runtime.session()))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert sojourn.flush(60)
    assert sum(isinstance(e, ProgramStart) for e in online.events()) == 1


NAMED = """
import os, sys, subprocess, sojourn
sojourn.init({url!r})
with sojourn.tool_call("parent"):
    sojourn.flush(5)
{body}
assert sojourn.flush(60)
"""
WORKER = "import sojourn; sojourn.tool_call('worker').start().stop(); assert sojourn.flush(60)"


@pytest.mark.parametrize(
    "body",
    [
        "env = {**os.environ, 'SOJOURN_URL': URL}\n"
        f"subprocess.run([sys.executable, '-c', {WORKER!r}], check=True, env=env)",
        "import multiprocessing as m\n"
        "def work():\n    sojourn.tool_call('worker').start().stop()\n"
        "p = m.get_context('fork').Process(target=work); p.start(); p.join(); assert p.exitcode == 0",
    ],
    ids=["child Python", "forked worker"],
)
def test_only_the_process_that_claimed_a_named_program_ends_it(python, server, body):
    code = NAMED.format(url=server.url, body=body.replace(": URL}", f": {server.url!r}}}"))
    code += "print(sojourn.runtime.session().event_sender.id)\n"
    mine = python(code, env={"SOJOURN_PROGRAM_ID": "run-7"}).stdout.split()[-1]
    tools = {getattr(e, "tool", None) for e in server.events()} - {None}
    assert tools == {"parent", "worker"}
    enders = [
        batch.emitter
        for batch in server.batches
        for raw in batch.events
        if isinstance(sojourn.wire_codec.decode_event(raw), ProgramEnd)
    ]
    assert enders == [mine]


def test_the_claim_is_given_up_with_the_session(server, monkeypatch):
    import os

    monkeypatch.setenv("SOJOURN_PROGRAM_ID", "run-7")
    before = set(os.environ)
    for _ in range(2):
        sojourn.init(server.url)
        sojourn.tool_call("t").start().stop()
        assert set(os.environ) - before
        sojourn.shutdown()
        assert set(os.environ) == before
    assert sum(isinstance(e, ProgramEnd) for e in server.events()) == 2
