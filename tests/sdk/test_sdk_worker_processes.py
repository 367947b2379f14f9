"""A program handed to worker processes: they work for it and open children of it, and do not end it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import sojourn
from sojourn.aeg import Aeg
from sojourn.testing import FakeServer
from sojourn.user_hints import NO_HINTS
from sojourn.wire_codec import decode_event
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart

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


@pytest.mark.parametrize("kind", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("way", ["Pool", "ProcessPoolExecutor"])
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
    numbers = [
        (batch.emitter, event.program_id, event.seq)
        for batch in server.batches
        for event in map(decode_event, batch.events)
    ]
    assert len(numbers) == len(set(numbers))


KEPT_WORKER = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import sojourn
from sojourn.program import ResolvedContext, add_resolver

def work(given=None):
    if given is not None:
        with given.here():
            return work()
    program = sojourn.current_program()
    return program and program.id

def serve(pipe):
    while True:
        pipe.send(work(*pipe.recv()))

def found_by_a_framework():
    return ResolvedContext(told[0]) if told else None

def started():
    if way == "ProcessPoolExecutor":
        pool = ProcessPoolExecutor(1, mp_context=context)
        return lambda *given: pool.submit(work, *given).result()
    if way == "Pool":
        pool = context.Pool(1)
        return lambda *given: pool.apply(work, given)
    ours, theirs = context.Pipe()
    context.Process(target=serve, args=(theirs,), daemon=True).start()
    return lambda *given: (ours.send(given), ours.recv())[1]

if __name__ == "__main__":
    url, way, opened = sys.argv[1:]
    told = []
    sojourn.init(url)
    context = multiprocessing.get_context("fork")
    if opened == "block":
        with sojourn.program("outer", id="outer"), sojourn.program("first", id="first"):
            run = started()
            print(run())
        print(run())
    elif opened == "cell":
        first = sojourn.program("first", id="first").open()
        run = started()
        print(run())
        first.end()
    else:
        add_resolver(found_by_a_framework)
        told.append(sojourn.program("first", id="first").make().start())
        run = started()
        print(run())
        told[0].end()
    with sojourn.program("second", id="second") as second:
        print(run(), run(second), flush=True)
"""


@pytest.mark.parametrize("opened", ["block", "cell", "framework"])
@pytest.mark.parametrize("way", ["Process", "Pool", "ProcessPoolExecutor"])
def test_a_forked_worker_that_outlives_its_program_is_outside_of_it(server, tmp_path, way, opened):
    file = tmp_path / "agent.py"
    file.write_text(KEPT_WORKER)
    command = [sys.executable, str(file), server.url, way, opened]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    while_open = ["first", "None"] if opened == "block" else ["first"]
    assert done.stdout.split() == [*while_open, "None", "second"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_speaks_for_the_program_and_has_no_say_in_its_life(online: FakeServer, copied):
    with (
        sojourn.program("top"),
        sojourn.tool_call("delegate", "c1"),
        sojourn.program("p", priority=3, deadline_s=9, tenant="t", aeg=Aeg(["n"]), max_steps=9) as p,
    ):
        p.enter_node("n")
        twin = copied(p)
        for name in (
            "id",
            "name",
            "parent_id",
            "root_id",
            "depth",
            "call_id",
            "tenant",
            "node",
            "steps_left",
        ):
            assert getattr(twin, name) == getattr(p, name), name
        assert twin.hints == p.hints._replace(deadline_at_s=pytest.approx(p.hints.deadline_at_s, abs=60))
        assert twin.is_open
        own, theirs = sojourn.request_parts(p)[0], sojourn.request_parts(twin)[0]
        assert str(p.id) in str(theirs)
        assert '"priority":3' in str(theirs)
        assert '"priority":3' in str(own)
        assert twin.start() is twin
        twin.end("error")
        assert p.is_open
        assert [
            q.id for q in sojourn.runtime.session().heartbeats.take_due(sojourn.runtime.clock() + 9)[0]
        ].count(p.id) == 1
    assert sojourn.flush(60)
    told = [e for e in online.program_events() if e.program_id == p.id]
    assert [e.status for e in told if isinstance(e, ProgramEnd)] == ["ok"]
    assert sum(isinstance(e, ProgramStart) for e in told) <= 1


def test_tenants_are_inherited_sent_with_every_request_and_replaceable(online: FakeServer):
    with sojourn.program("a", tenant="acme"), sojourn.program("b") as b:
        assert b.tenant == "acme"
        assert '"tenant":"acme"' in str(sojourn.request_fields())
        with sojourn.program("c", tenant="other") as c, sojourn.program("d", parent=None) as d:
            assert (c.tenant, d.tenant) == ("other", None)
            assert "tenant" not in str(sojourn.request_fields())
    assert sojourn.flush(60)
    starts = {e.name: e.tenant for e in online.program_events() if isinstance(e, ProgramStart)}
    assert starts == {"a": "acme", "b": "acme", "c": "other", "d": None}
    with pytest.raises(sojourn.ArgumentError, match="tenant is 5"):
        sojourn.program("e", tenant=5)  # type: ignore[call-overload]
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
