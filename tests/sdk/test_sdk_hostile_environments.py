"""Proxies without a library, missing certificates, no threads, forks at bad moments, long backoffs. None of
them disturbs the agent."""

from __future__ import annotations

import threading
import time

import pytest
import sojourn
from scripted_transport import Script, Source
from sojourn import event_sender as event_sender_module
from sojourn.event_sender import EventSender
from sojourn.stats import Counters
from sojourn.testing import FakeServer
from sojourn.wire_events import Heartbeat, ToolStart
from waiting import wait_until

HOSTILE = [
    pytest.param({"all_proxy": "socks5://127.0.0.1:9"}, "http", id="socks without socksio"),
    pytest.param({"http_proxy": "ftp://x"}, "http", id="unknown proxy"),
    pytest.param({"SSL_CERT_FILE": "/nowhere/at/all.pem"}, "https", id="no certificates"),
]
AGENT = """
import sojourn
for _ in range(2):
    with sojourn.program("p"), sojourn.tool_call("t"):
        assert sojourn.request_parts() == ({}, {})
assert sojourn.flush() and sojourn.stats().dialect is None
"""
CLEAR = {name: "" for name in ("NO_PROXY", "no_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")}


@pytest.mark.parametrize(("env", "scheme"), HOSTILE)
def test_a_hostile_environment_never_reaches_an_agent_that_did_not_call_init(python, env, scheme):
    said = python(AGENT, env={**CLEAR, **env, "SOJOURN_URL": f"{scheme}://127.0.0.1:9"})
    assert said.stderr.count("sojourn stays off") == 1


@pytest.mark.parametrize(("env", "scheme"), HOSTILE)
def test_init_raises_a_config_error_for_a_hostile_environment(python, env, scheme):
    code = f"""
    import sojourn
    try:
        sojourn.init("{scheme}://127.0.0.1:9")
    except sojourn.ConfigError as error:
        assert error.__cause__ is not None
    else:
        raise SystemExit("not told")
    with sojourn.program("p"): pass
    """
    python(code, env={**CLEAR, **env})


def test_a_failed_init_leaves_the_session_before_it_alone(online, monkeypatch):
    for name, value in {**CLEAR, "http_proxy": "ftp://x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(sojourn.ConfigError):
        sojourn.init("http://127.0.0.1:9")
    with sojourn.program("p"):
        pass
    assert sojourn.flush(60)
    assert len(online.events()) == 2


def test_one_failed_start_of_the_thread_is_not_the_end(monkeypatch):
    now = [0.0]
    sink = Script()
    sender = EventSender(sink, Counters(), clock=lambda: now[0])
    start = threading.Thread.start
    tries = []

    def refuse(self):
        tries.append(self)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(100):
        assert sender.put(Source(), Heartbeat)
    assert sender.counters["thread_start_failed"] == len(tries) == 1  # not tried again with every event
    now[0] += 2
    sender.put(Source(), Heartbeat)
    assert sender.counters["thread_start_failed"] == 2
    monkeypatch.setattr(threading.Thread, "start", start)
    now[0] += 2
    sender.put(Source(), Heartbeat)
    assert sender.flush(60)
    assert sender.counters["events_sent"] == 102
    sender.close(1)


FORKING = """
import os, signal, threading, time, sojourn, sojourn.config
from sojourn import runtime
{set_up}
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    with sojourn.program("kid"), sojourn.tool_call("kid"):
        pass
    sojourn.shutdown()
    sojourn.init({url!r}, dialect="sojourn")
    with sojourn.program("kid"), sojourn.tool_call("kid"):
        pass
    os._exit(0 if sojourn.flush(5) else 7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os._exit(0)
"""


UNTIL_SET_UP = """
while runtime.live is None:
    time.sleep(0.01)
with runtime.session_lock:
    pass
"""
"""The other thread has made the session and waits for the server's answer, without the lock."""


@pytest.mark.parametrize(
    "set_up",
    [
        "init = lambda: sojourn.init({slow!r}, probe_timeout_s=30)\n"
        "threading.Thread(target=init, daemon=True).start()\n" + UNTIL_SET_UP,
        "os.environ['SOJOURN_URL'] = {slow!r}\n"
        "C = sojourn.config.Config; resolve = C.resolve.__func__\n"
        "C.resolve = classmethod(lambda *a, **k: resolve(*a, **{{**k, 'probe_timeout_s': 30}}))\n"
        "threading.Thread(target=sojourn.headers, daemon=True).start()\n" + UNTIL_SET_UP,
        "held = threading.Event()\n"
        "hold = lambda: (runtime.session_lock.acquire(), held.set(), time.sleep(60))\n"
        "threading.Thread(target=hold, daemon=True).start()\nheld.wait()",
    ],
    ids=["in init", "in the first use", "with the lock held"],
)
def test_a_fork_while_another_thread_sets_up_does_not_hang(python, server, set_up):
    with FakeServer() as slow:
        slow.probe_delay_s = 30
        code = FORKING.format(url=server.url, set_up=set_up.format(slow=slow.url))
        assert python(code).stdout.strip() == "0"
    assert sum(isinstance(e, ToolStart) for e in server.events()) == 1


def test_the_lock_is_free_while_the_probe_is_awaited(monkeypatch):
    monkeypatch.setattr(sojourn.runtime, "live", None)
    with FakeServer() as slow:
        slow.probe_delay_s = 30
        thread = threading.Thread(
            target=sojourn.init, args=(slow.url,), kwargs={"probe_timeout_s": 30.0}, daemon=True
        )
        thread.start()
        wait_until(lambda: slow.probes)
        sojourn.headers()
        assert thread.is_alive(), "headers() waited for the probe"
        slow._released.set()
        thread.join(30)


# ---- backoff


class Broken(Script):
    """Raises while ``broken``."""

    broken = True

    def post(self, path, body):
        if self.broken:
            raise OSError
        return super().post(path, body)


def in_backoff(sink, **settings):
    """A sender that has just failed and would wait for half a minute."""
    sender = EventSender(sink, Counters(), linger_s=0.0, **settings)
    sender.put(Source(), Heartbeat)
    wait_until(lambda: sender.counters["dropped_send"])
    sink.broken = False
    sender.put(Source(), Heartbeat)
    return sender


class Promise:
    """Heartbeats of which none is due."""

    def __init__(self, promised=False):
        self.promised = promised

    def take_due(self, now):
        return (), None


def test_a_promised_heartbeat_bounds_the_backoff(monkeypatch):
    assert event_sender_module.MAX_BEATING_BACKOFF_S <= 5.0
    monkeypatch.setattr(event_sender_module, "FIRST_BACKOFF_S", 30.0)
    monkeypatch.setattr(event_sender_module, "MAX_BEATING_BACKOFF_S", 0.2)
    sinks = Broken(), Broken()
    silent = in_backoff(sinks[0], heartbeats=Promise())
    promising = in_backoff(sinks[1], heartbeats=Promise(1))
    wait_until(lambda: sinks[1].bodies)
    assert not sinks[0].bodies
    silent.close(1)
    promising.close(1)


def test_promised_heartbeats_end_the_backoff_soon_after_the_server_is_back(online, monkeypatch):
    monkeypatch.setattr(event_sender_module, "FIRST_BACKOFF_S", 30.0)
    monkeypatch.setattr(event_sender_module, "MAX_BEATING_BACKOFF_S", 0.2)
    online.mode = "500"
    with sojourn.program("silent", heartbeat=False):
        wait_until(lambda: sojourn.stats()["http_500"])
        online.mode = "ok"
        with sojourn.tool_call("t"):
            time.sleep(0.3)
        assert online.events() == []
        with sojourn.program("promising"):
            online.wait_for_events(3, 30)
