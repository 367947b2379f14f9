"""How a process ends is how its heartbeats end: nothing speaks for a dead one, and no signal is touched."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest
from sojourn.events import Heartbeat, ProgramEnd

QUICK = """
import dataclasses, os, signal, sys, time
for number in (signal.SIGHUP, signal.SIGTERM):
    # Whoever runs the tests under nohup, or in the background of a shell, has all their children ignore some.
    signal.signal(number, {handler})
import sojourn
from sojourn.config import Config
resolve = Config.resolve.__func__
Config.resolve = classmethod(
    lambda cls, *a, **k: dataclasses.replace(resolve(cls, *a, **k), heartbeat_s=0.05, linger_s=0)
)
sojourn.init({url!r})
"""


def heard(server, count):
    end_s = time.monotonic() + 10
    while len(beats := [e for e in server.events() if isinstance(e, Heartbeat)]) < count:
        assert time.monotonic() < end_s, f"{len(beats)} of {count} heartbeats"
        time.sleep(0.01)


def silence_follows(server):
    time.sleep(0.1)  # what was on its way
    before = len(server.events())
    time.sleep(0.4)
    assert len(server.events()) == before


@pytest.fixture
def beating(server):
    """Starts a process with a heartbeat every 50 ms, and waits until it was heard three times."""
    started = []

    def start(body, handler="signal.SIG_DFL"):
        code = QUICK.format(url=server.url, handler=handler) + textwrap.dedent(body)
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        assert process.stdout.readline() == "up\n"
        heard(server, 3)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        process.stdout.close()


OPEN = """
p = sojourn.program("p", id="p").make().start()
print("up", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_killed_process_falls_silent_and_no_end_is_invented(server, beating, number):
    process = beating(OPEN + "time.sleep(60)")
    process.send_signal(number)
    assert process.wait(10) == -number, "the signal does what it always did"
    silence_follows(server)
    assert not any(isinstance(e, ProgramEnd) for e in server.events())


def test_a_process_that_ignores_a_signal_goes_on_ignoring_it(server, beating):
    process = beating(OPEN + "time.sleep(60)", handler="signal.SIG_IGN")
    before = sum(isinstance(e, Heartbeat) for e in server.events())
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    heard(server, before + 3)
    assert process.poll() is None


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "os._exit(3)", "raise RuntimeError"])
def test_a_process_that_left_its_program_open_falls_silent(server, beating, end):
    process = beating(OPEN + "time.sleep(0.3); sys.stderr = open(os.devnull, 'w')\n" + end)
    process.wait(10)
    silence_follows(server)
    assert not any(isinstance(e, ProgramEnd) for e in server.events())


def test_a_stopped_process_is_silent_and_goes_on_when_it_goes_on(server, beating):
    process = beating(OPEN + "time.sleep(60)")
    process.send_signal(signal.SIGSTOP)
    silence_follows(server)
    before = sum(isinstance(e, Heartbeat) for e in server.events())
    process.send_signal(signal.SIGCONT)
    heard(server, before + 2)


def test_a_handler_of_the_users_own_ends_things_its_own_way(server, beating):
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
    assert process.wait(10) == 5
    assert [e.status for e in server.program_events() if isinstance(e, ProgramEnd)] == ["error"]
    silence_follows(server)


def test_a_forked_child_that_lives_on_does_not_beat_for_its_dead_parent(server, beating):
    process = beating(
        """
        p = sojourn.program("p", id="p").make().start()
        if os.fork() == 0:
            os.close(1)
            with sojourn.tool_call("kid"):  # its own sender runs
                pass
            time.sleep(3)
            os._exit(0)
        print("up", flush=True)
        time.sleep(60)
        """
    )
    process.kill()
    process.wait(10)
    silence_follows(server)


def test_no_signal_is_handled_by_us(python, server):
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
