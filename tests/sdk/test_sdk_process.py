"""Processes that fork, end, or are killed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from operator import attrgetter

import pytest
import sojourn
from sdk_records import context_of, told
from sojourn.aeg import Aeg
from sojourn.testing import FakeServer
from sojourn.user_hints import NO_HINTS
from sojourn.wire_codec import decode_event
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart


def script(server, body):
    opening = f"import os, sys, time, signal, sojourn; sojourn.init({server.url!r})\n"
    return opening + textwrap.dedent(body)


def numbers(server):
    """Every event as its server tells them apart; doubles show as repetitions."""
    return [
        (batch.emitter, event.program_id, event.seq)
        for batch in server.batches
        for event in map(decode_event, batch.events)
    ]


@pytest.mark.parametrize("end", ["pass", "raise RuntimeError('x')", "os.kill(os.getpid(), signal.SIGINT)"])
def test_a_process_that_ends_by_itself_delivers_everything(python, server, end):
    python(
        script(
            server,
            f"""
            with sojourn.program("p"), sojourn.tool_call("t"):
                {end}
                time.sleep(0)
            """,
        ),
        check=False,
    )
    names = [type(e).__name__ for e in server.events()]
    assert names == ["ProgramStart", "ToolStart", "ToolStop", "ProgramEnd"]


def test_a_forked_child_speaks_for_itself_only(python, server):
    python(
        script(
            server,
            """
            with sojourn.program("parent", id="parent") as p:
                for _ in range(50):
                    p.start()
                    with sojourn.tool_call("par"): pass
                pid = os.fork()
                if pid == 0:
                    beats = sojourn.runtime.session().heartbeats.promised
                    with sojourn.tool_call("kid"): pass
                    with sojourn.program("kid", id="kid"): pass
                elif os.waitpid(pid, 0)[1]:
                    sys.exit("it beats for its parent")
            if pid == 0:
                sojourn.flush()
                os._exit(beats)
            """,
        )
    )
    seen = numbers(server)
    assert len(seen) == len(set(seen))
    assert len({emitter for emitter, _, _ in seen}) == 2
    events = server.events()
    assert sum(isinstance(e, ToolStart) and e.tool == "par" for e in events) == 50
    assert sum(isinstance(e, ToolStart) and e.tool == "kid" for e in events) == 1
    ends = [e.program_id for e in events if isinstance(e, ProgramEnd)]
    assert sorted(ends) == ["kid", "parent"]  # the child left the parent's block too, and said nothing of it


def test_forks_while_other_threads_hold_every_lock(python, server):
    code = script(
        server,
        """
        import threading
        stop = False
        def hammer():
            with sojourn.program():
                while not stop:
                    with sojourn.tool_call("h"): pass
                    sojourn.request_parts()
                    sojourn.stats()
        threads = [threading.Thread(target=hammer, daemon=True) for _ in range(3)]
        [t.start() for t in threads]
        bad = 0
        for _ in range(15):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                with sojourn.program(), sojourn.tool_call("kid"): pass
                os._exit(0 if sojourn.flush(10) else 7)
            bad += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
        stop = True
        [t.join() for t in threads]
        print(bad)
        """,
    )
    assert python(code).stdout.strip() == "0"
    assert sum(isinstance(e, ToolStart) and e.tool == "kid" for e in server.events()) == 15


def test_the_sender_imports_nothing_which_a_fork_could_cut_in_half(python, server):
    code = f"""
    import sys, sojourn
    sojourn.init({server.url!r}, probe_timeout_s=0)
    before = set(sys.modules)
    with sojourn.program("p"), sojourn.tool_call("t"):
        sojourn.request_parts()
    assert sojourn.flush(60) and sojourn.stats()["events_sent"]
    print(sorted(set(sys.modules) - before))
    """
    assert python(code).stdout.strip() == "[]"


# -- a program handed to worker processes: they work for it, open children of it, and do not end it


WORKERS = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import sojourn

def work(program, n):
    with program.here(), sojourn.tool_call(f"in {n}"):
        assert sojourn.current_program() is program
    with sojourn.program("sub", parent=program, id=f"sub {n}"):
        pass
    program.end()
    return sojourn.stats().url

if __name__ == "__main__":
    url, kind, way = sys.argv[1:]
    sojourn.init(url)
    context = multiprocessing.get_context(kind)
    with sojourn.program("fan-out", id="p", tenant="acme", deadline_s=60) as p:
        if way == "Pool":
            with context.Pool(2, sojourn.init, (url,)) as pool:
                found = pool.starmap(work, [(p, n) for n in range(3)], chunksize=1)
                pool.close()
                pool.join()
        else:
            ready = {"initializer": sojourn.init, "initargs": (url,)}
            with ProcessPoolExecutor(2, mp_context=context, **ready) as pool:
                found = list(pool.map(work, [p] * 3, range(3)))
    assert found == [url] * 3, found
"""


@pytest.mark.parametrize(
    ("kind", "way"),
    [("fork", "Pool"), ("spawn", "ProcessPoolExecutor"), ("forkserver", "ProcessPoolExecutor")],
)
def test_workers_of_every_kind_work_for_the_program_they_are_given(server, tmp_path, kind, way):
    file = tmp_path / "agent.py"
    file.write_text(WORKERS)
    command = [sys.executable, str(file), server.url, kind, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    events = server.program_events()
    tools = sorted((e.tool, e.program_id) for e in events if isinstance(e, ToolStart))
    assert tools == [("in 0", "p"), ("in 1", "p"), ("in 2", "p")]
    children = [e for e in events if isinstance(e, ProgramStart) and e.program_id != "p"]
    assert sorted((e.program_id, e.parent_program_id, e.root_program_id, e.tenant) for e in children) == [
        (f"sub {n}", "p", "p", "acme") for n in range(3)
    ]
    ends = sorted(e.program_id for e in events if isinstance(e, ProgramEnd))
    assert ends == ["p", "sub 0", "sub 1", "sub 2"], "a worker's copy ends nothing"
    assert len(numbers(server)) == len(set(numbers(server)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_speaks_for_the_program_and_has_no_say_in_its_life(online: FakeServer, copied):
    with (
        sojourn.program("top"),
        sojourn.tool_call("delegate", "c1"),
        sojourn.program("p", priority=3, deadline_s=9, tenant="t", aeg=Aeg(["n"]), max_steps=9) as p,
    ):
        p.enter_node("n")
        twin = copied(p)
        kept = attrgetter(
            "id", "name", "parent_id", "root_id", "depth", "call_id", "tenant", "node", "steps_left"
        )
        assert kept(twin) == kept(p)
        assert twin.hints == p.hints._replace(deadline_at_s=pytest.approx(p.hints.deadline_at_s, abs=60))
        assert twin.is_open
        for one in (p, twin):
            context = context_of(sojourn.request_parts(one)[0])
            assert (context.program_id, context.priority) == (p.id, 3)
        assert twin.start() is twin
        twin.end("error")
        assert p.is_open
        beating = sojourn.runtime.session().heartbeats.take_due(sojourn.runtime.clock() + 9)[0]
        assert [q.id for q in beating].count(p.id) == 1
    assert [e.status for e in told(online, ProgramEnd) if e.program_id == p.id] == ["ok"]
    assert sum(e.program_id == p.id for e in told(online, ProgramStart)) <= 1


def test_a_tenant_of_any_length_is_clipped_to_the_wires_bound(online: FakeServer):
    with sojourn.program("f", tenant="ü" * 500) as f:
        assert f.tenant == "ü" * 128


@pytest.mark.parametrize(("queued_s", "left_s"), [(0.0, 5.0), (3.0, 2.0), (7.0, -2.0), (-60.0, 5.0)])
def test_a_deadline_goes_to_another_machine_as_the_seconds_left(
    online: FakeServer, monkeypatch, queued_s: float, left_s: float
):
    """Its monotonic clock counts from another moment. The wait in a queue counts, unless its wall clock is
    slow."""
    now_s, wall_s = 1_000_000.0, 1.7e9
    monkeypatch.setattr(sojourn.runtime, "clock", lambda: now_s)
    monkeypatch.setattr("time.time", lambda: wall_s)
    with sojourn.program("p", deadline_s=9, priority=3) as p:
        now_s += 4
        pickled = pickle.dumps([p, p.hints, sojourn.program("plain").make()])
        now_s, wall_s = 70.0, wall_s + queued_s
        there, hints, plain = pickle.loads(pickled)
        assert there.hints == hints == p.hints._replace(deadline_at_s=70.0 + left_s)
        assert plain.hints is NO_HINTS
