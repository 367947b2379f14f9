"""Processes that fork, end, or are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from sdk_settings import PATH as SUPPORT
from sojourn.wire_events import Heartbeat, ProgramEnd, ToolStart
from waiting import wait_until

OPENING = """
import os, sys, time, signal
import sojourn
sojourn.init({url!r})
"""


def script(server, body):
    import textwrap

    return OPENING.format(url=server.url) + textwrap.dedent(body)


def numbers(server):
    """Every event as its server tells them apart; doubles show as repetitions."""
    return [
        (batch.emitter, event.program_id, event.seq)
        for batch in server.batches
        for event in [__import__("sojourn.wire_codec").wire_codec.decode_event(raw) for raw in batch.events]
    ]


@pytest.mark.parametrize(
    "end", ["pass", "sys.exit(3)", "raise RuntimeError('x')", "os.kill(os.getpid(), signal.SIGINT)"]
)
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
    assert [type(e).__name__ for e in server.events()] == [
        "ProgramStart",
        "ToolStart",
        "ToolStop",
        "ProgramEnd",
    ]


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
                    with sojourn.tool_call("kid"): pass
                    with sojourn.program("kid", id="kid"): pass
                if pid:
                    os.waitpid(pid, 0)
            if pid == 0:
                sojourn.flush()
                os._exit(0)
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


def test_forked_workers_deliver_though_they_skip_atexit(python, server):
    code = script(
        server,
        """
        import multiprocessing
        context = multiprocessing.get_context("fork")
        def work(n):
            with sojourn.tool_call(f"w{n}"):
                return n
        with sojourn.program("parent"):
            workers = [context.Process(target=work, args=(n,)) for n in range(3)]
            [w.start() for w in workers]
            [w.join() for w in workers]
        """,
    )
    python(code)
    assert sorted(e.tool for e in server.events() if isinstance(e, ToolStart)) == ["w0", "w1", "w2"]


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


# -- Heartbeats stop when a process ends or is stopped, and the SDK handles no signal.


QUICK = """
import os, signal, sys, time
for number in (signal.SIGHUP, signal.SIGTERM):
    # Under nohup, or in the background of a shell, processes ignore some of these.
    signal.signal(number, {handler})
import sojourn
from sdk_settings import resolve_with
sojourn.config.Config.resolve = resolve_with(heartbeat_s=0.05, linger_s=0)
sojourn.init({url!r})
"""


def heartbeats(server):
    return sum(isinstance(e, Heartbeat) for e in server.events())


def silence_follows(server):
    """Wait for a span of eight heartbeat intervals without an event."""

    def silent():
        before = len(server.events())
        time.sleep(0.4)
        return len(server.events()) == before

    wait_until(silent)


@pytest.fixture
def beating(server):
    """Start a process with a heartbeat every 50 ms and wait for three of them."""
    started = []

    def start(body, handler="signal.SIG_DFL"):
        code = QUICK.format(url=server.url, handler=handler) + textwrap.dedent(body)
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((os.environ.get("PYTHONPATH", ""), SUPPORT))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.readline() == "up\n"
        wait_until(lambda: heartbeats(server) >= 3)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a forked child too
        process.communicate()


OPEN = """
p = sojourn.program("p", id="p").make().start()
print("up", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_killed_process_falls_silent_and_reports_no_end(server, beating, number):
    process = beating(OPEN + "time.sleep(60)")
    process.send_signal(number)
    assert process.wait(30) == -number, "the signal does what it always did"
    silence_follows(server)
    assert not any(isinstance(e, ProgramEnd) for e in server.events())


def test_the_users_signal_handler_ends_the_program(server, beating):
    process = beating(
        """
        def stop(number, frame):
            raise SystemExit(5)
        signal.signal(signal.SIGTERM, stop)
        with sojourn.program("p"), sojourn.tool_call("t"):
            print("up", flush=True)
            time.sleep(60)
        """
    )
    process.terminate()
    assert process.wait(30) == 5
    assert [e.status for e in server.program_events() if isinstance(e, ProgramEnd)] == ["error"]
    silence_follows(server)


def test_a_forked_child_sends_no_heartbeats_for_its_dead_parent(server, beating):
    process = beating(
        """
        p = sojourn.program("p", id="p").make().start()
        if os.fork() == 0:
            os.close(1)
            with sojourn.tool_call("kid"):  # its own sender runs
                pass
            time.sleep(60)
            os._exit(0)
        print("up", flush=True)
        time.sleep(60)
        """
    )
    process.kill()
    process.wait(30)
    silence_follows(server)


def test_the_sdk_handles_no_signal(python, server):
    python(
        f"""
        import signal
        before = {{n: signal.getsignal(n) for n in signal.valid_signals()}}
        import sojourn
        sojourn.init({server.url!r}, threads=True)
        with sojourn.program("p"):
            assert {{n: signal.getsignal(n) for n in signal.valid_signals()}} == before
        """
    )
