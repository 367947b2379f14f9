"""A program that comes back under its id, in the same process or in another."""

from __future__ import annotations

import pytest
import sojourn
from sojourn.heartbeats import Heartbeats
from sojourn.ids import ProgramId
from sojourn.program import Program
from sojourn.wire_events import ProgramEnd


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
