"""Proxies without a library, missing certificates, no threads, forks at bad moments, long backoffs. None of
them disturbs the agent."""

from __future__ import annotations

import threading

import pytest
import sojourn
from scripted_transport import Script, Source
from sojourn import event_sender as event_sender_module
from sojourn.event_sender import EventSender
from sojourn.stats import Counters
from sojourn.wire_events import Heartbeat
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
