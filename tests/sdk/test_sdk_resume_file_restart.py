"""A program that goes on after its client was restarted: the file that holds its id meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import stat
import subprocess
import sys
import threading

import pytest
import sojourn
from sojourn.errors import ArgumentError
from sojourn.ids import MAX_ID_BYTES
from sojourn.resume_file import ResumeBusy, ResumeFile
from sojourn.wire_codec import decode_event
from sojourn.wire_events import ProgramEnd, ProgramStart


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.id"


AGENT = """
import sys, time, sojourn
sojourn.init({url!r})
with sojourn.program("fix", resume={path!r}) as p, sojourn.tool_call("work"):
    assert sojourn.flush(60)
    print(p.id, flush=True)
    {then}
"""


def started(server, path, then="time.sleep(60)"):
    code = AGENT.format(url=server.url, path=str(path), then=then)
    agent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return agent, agent.stdout.readline().strip()


def killed(agent, number=signal.SIGKILL):
    agent.send_signal(number)
    assert agent.wait(10) == -number
    agent.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_client_comes_back_as_the_same_program(server, path, number):
    first, its_id = started(server, path)
    killed(first, number)
    assert path.read_text() == its_id + "\n"
    second, same = started(server, path, then="pass")
    assert second.wait(10) == 0
    second.stdout.close()
    assert same == its_id
    assert not path.exists()
    told = [(type(e), e.program_id) for e in server.events() if isinstance(e, (ProgramStart, ProgramEnd))]
    assert told == [(ProgramStart, its_id), (ProgramStart, its_id), (ProgramEnd, its_id)]
    assert len({batch.emitter for batch in server.batches}) == 2, "numbers of the two can not collide"


@pytest.mark.parametrize(
    "error", [ValueError(), KeyboardInterrupt(), asyncio.CancelledError(), SystemExit(1)]
)
def test_only_a_clean_end_removes_the_file(path, error):
    with pytest.raises(type(error)), sojourn.program(resume=path) as first:
        raise error
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == f"{first.id}\n"
    with sojourn.program(resume=path) as again:
        assert again.id == first.id
    assert not path.exists()
    with sojourn.program(resume=path) as fresh:
        assert fresh.id != first.id


@pytest.mark.parametrize(
    "content",
    [b"\n", b"a\nb\n", b"a\n\n", b"\xff\xfe", b"a\x00b", b"\x1b[2J", b"x" * (MAX_ID_BYTES + 1), b"x" * 10**7],
    ids=lambda content: repr(content[:8]),
)
def test_a_file_that_holds_no_id_is_named_and_left_alone(path, content):
    path.write_bytes(content)
    with pytest.raises(ArgumentError) as caught:
        sojourn.program("fix", resume=path)
    assert str(path) in str(caught.value)
    assert "expected one line, a program id of 1 to 256 bytes" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["", "no/such/folder", ".", "a\0b", "x" * 5000])
def test_a_path_that_cannot_be_one_is_refused_before_the_agent_runs(tmp_path, name):
    with pytest.raises(ArgumentError, match="resume"):
        sojourn.program("fix", resume=f"{tmp_path}/{name}" if name else name)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("elsewhere", path)], ids=["pipe", "link"]
)
def test_what_is_no_file_is_refused_and_never_waited_for(path, make):
    """A pipe would be read for ever. A link in a folder of all leads to what somebody else chose."""
    scope = sojourn.program("fix", resume=path)
    make(path)
    path.with_name("elsewhere").write_text("")
    with pytest.raises(ArgumentError, match="not a regular file"):
        sojourn.program("fix", resume=path)
    with scope as p:
        assert p.is_open
    assert sojourn.stats()["resume_failed"] == 1
    assert path.with_name("elsewhere").read_text() == ""


def test_an_id_and_a_file_for_it_contradict_each_other(path):
    with pytest.raises(ArgumentError, match="both id and resume"):
        sojourn.program("fix", id="x", resume=path)
    assert not path.exists()


def test_a_second_run_in_the_same_process_is_a_program_of_its_own(path):
    with sojourn.program(resume=path) as outer:
        with sojourn.program(resume=path) as inner:
            assert inner.id != outer.id
            assert inner.parent_id == outer.id
        assert path.read_text() == outer.id + "\n"
    assert not path.exists()
    assert sojourn.stats()["resume_busy"] == 1


def test_no_two_processes_ever_hold_the_file_at_once(path):
    holders: list[str] = []
    together: list[int] = []
    done = threading.Event()

    def hammer(seed: int) -> None:
        chance = random.Random(seed)
        while not done.is_set():
            try:
                file = ResumeFile(str(path))
            except ResumeBusy:
                continue
            holders.append(file.id)
            together.append(len(holders))
            holders.pop()
            if len(together) > 500:
                done.set()
            file.remove() if chance.random() < 0.7 else file.close()

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done.is_set()
    assert set(together) == {1}


# -- A program that comes back under its id, in the same process or in another.


WORKER = "import sojourn; sojourn.tool_call('worker').start().stop(); assert sojourn.flush(60)"
WORKERS = {
    "child Python": f"subprocess.run([sys.executable, '-c', {WORKER!r}], check=True)",
    "forked worker": f"p = fork.Process(target=exec, args=({WORKER!r},)); p.start(); p.join()",
}


@pytest.mark.parametrize("worker", WORKERS.values(), ids=WORKERS)
def test_only_the_process_that_claimed_a_named_program_ends_it(python, server, worker):
    code = f"""
    import multiprocessing, subprocess, sys, sojourn
    fork = multiprocessing.get_context("fork")
    with sojourn.tool_call("parent"):
        sojourn.flush(5)
    {worker}
    assert sojourn.flush(60)
    print(sojourn.runtime.session().event_sender.id)
    """
    mine = python(code, env={"SOJOURN_PROGRAM_ID": "run-7", "SOJOURN_URL": server.url}).stdout.split()[-1]
    assert {getattr(e, "tool", None) for e in server.events()} - {None} == {"parent", "worker"}
    assert {e.program_id for e in server.events()} == {"run-7"}
    ends = [(b.emitter, decode_event(raw)) for b in server.batches for raw in b.events]
    assert [emitter for emitter, event in ends if isinstance(event, ProgramEnd)] == [mine]
