"""What a server is taken for, and how that changes."""

from __future__ import annotations

import time

import pytest
import sojourn
from sojourn.probe import Server, probe
from sojourn.testing import FakeServer, refusing_url
from sojourn.transport import Answer


class Says:
    def __init__(self, answer):
        self.answer = answer

    def get(self, path, timeout_s):
        assert path == "/sojourn/v1/capabilities"
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "dialect"),
    [
        (Answer(200, b'{"name": "sojourn", "wire": [1], "version": "9"}'), "sojourn"),
        (Answer(200, b'{"name": "sojourn", "wire": [1, 2]}'), "sojourn"),
        (Answer(200, b'{"name": "sojourn", "wire": [2]}'), "vllm"),
        (Answer(200, b'{"name": "other", "wire": [1]}'), "vllm"),
        (Answer(200, b'{"ok": true}'), "vllm"),
        (Answer(200, b"<html>welcome</html>"), "vllm"),
        (Answer(200, b"\xff\xfe"), "vllm"),
        (Answer(200, b"[" * 100_000), "vllm"),
        (Answer(404, b""), "vllm"),
        (Answer(405, b""), "vllm"),
        (Answer(401, b""), None),
        (Answer(500, b""), None),
        (Answer(307, b""), None),
        (OSError("refused"), None),
    ],
)
def test_answers_are_read_cautiously(answer, dialect):
    assert probe(Says(answer), timeout_s=1) == dialect


def test_a_given_dialect_stays():
    server = Server("sojourn")
    server.learn("vllm")
    assert server.dialect.name == "sojourn"
    assert server.known


def test_a_stock_server_gets_headers_only_and_no_events():
    with FakeServer(sojourn=False) as server:
        sojourn.init(server.url)
        with sojourn.program("p") as p:
            assert sojourn.request_parts() == ({}, {"X-Session-ID": p.id})
        assert sojourn.flush(5)
        assert server.probes == 1
        assert server.batches == []
        assert server.authorizations == []
        stats = sojourn.stats()
        assert (stats.dialect, stats.dialect_known) == ("vllm", True)
        assert stats["dropped_unsupported"] == 2


def test_the_events_themselves_teach_when_the_probe_came_too_early():
    with FakeServer() as server:
        server.probe_delay_s = 30
        sojourn.init(server.url, probe_timeout_s=0.05)
        assert sojourn.stats().dialect_known is False
        assert sojourn.request_fields() == {}  # cautious: headers only
        assert sojourn.headers()
        server._released.set()
        with sojourn.program():
            assert sojourn.flush(5)
        assert (sojourn.stats().dialect, sojourn.stats().dialect_known) == ("sojourn", True)


@pytest.mark.parametrize(("probe_timeout_s", "at_most_s"), [(0.0, 0.5), (0.2, 1.0)])
def test_init_waits_no_longer_than_it_may(probe_timeout_s, at_most_s):
    with FakeServer() as server:
        server.probe_delay_s = 30
        started = time.monotonic()
        sojourn.init(server.url, probe_timeout_s=probe_timeout_s)
        assert time.monotonic() - started < at_most_s
        server._released.set()


def test_an_absent_server_costs_init_nothing_and_breaks_nothing():
    sojourn.init(refusing_url())
    with sojourn.program("p") as p, sojourn.tool_call("t"):
        assert sojourn.request_parts() == ({}, {"X-Session-ID": p.id})
    sojourn.flush(1)
    assert sojourn.stats().dialect_known is False
    assert sojourn.stats()["net_ConnectError"] >= 1


def test_a_server_with_a_key_gets_headers_until_it_is_shown(monkeypatch, caplog):
    with FakeServer(api_key="secret") as server:
        sojourn.init(server.url)
        assert sojourn.request_fields() == {}
        assert "SOJOURN_API_KEY" in caplog.text
        monkeypatch.setenv("OPENAI_API_KEY", "secret")  # never used for events
        sojourn.init(server.url, probe_timeout_s=0.31)
        assert sojourn.request_fields() == {}
        monkeypatch.setenv("SOJOURN_API_KEY", "secret")
        sojourn.init(server.url)
        assert sojourn.request_fields()
        sojourn.init(server.url, api_key="secret", probe_timeout_s=0.32)
        assert sojourn.request_fields()


def test_an_explicit_dialect_asks_nothing(server):
    sojourn.init(server.url, dialect="sojourn")
    assert sojourn.request_fields()["vllm_xargs"]
    assert server.probes == 0


def test_init_again_is_harmless_and_with_other_arguments_replaces(server):
    sojourn.init(server.url)
    with sojourn.program("a"):
        sojourn.init(server.url)
    assert server.probes == 1
    with FakeServer() as second:
        sojourn.init(second.url)
        assert len(server.events()) == 2  # the first session was closed properly
        with sojourn.program("b"):
            pass
        assert sojourn.flush(5)
        assert len(second.events()) == 2
