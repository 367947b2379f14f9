"""What a server is taken for, and how that changes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import sojourn
from sojourn import dialect_probe, event_sender
from sojourn.dialect_probe import ServerDialect, probe_dialect
from sojourn.http_transport import HttpResponse
from sojourn.stats import Counters
from sojourn.testing import FakeServer, refusing_url


class Says:
    """A transport that answers each path as told, and 404 to all others."""

    def __init__(self, answer, **others):
        self.answers = {"/sojourn/v1/capabilities": answer, **others}
        self.asked = []

    def get(self, path, timeout_s):
        self.asked.append(path)
        answer = self.answers.get(path, HttpResponse(404, b"{}"))
        if isinstance(answer, Exception):
            raise answer
        return answer


OURS = (b'{"name": "sojourn", "wire": [1], "version": "9"}', b'{"name": "sojourn", "wire": [1, 2]}')
NOT_OURS = (
    b'{"name": "sojourn", "wire": [2]}', b'{"name": "other", "wire": [1]}', b'{"ok": true}',
    b"<html>welcome</html>", b"\xff\xfe", b"[" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize(("reported", "level"), [(False, "WARNING"), (True, "DEBUG")])
@pytest.mark.parametrize("answer", [HttpResponse(404, b""), HttpResponse(200, b'{"ok": true}')], ids=str)
def test_a_server_without_sojourn_is_told_once(caplog, answer, reported, level):
    caplog.set_level("DEBUG")
    found = ServerDialect(Says(answer), Counters(), address="http://h:1", reported=reported)
    found.ask()
    told = [one for one in caplog.records if "no sojourn server answers at http://h:1" in one.getMessage()]
    assert [one.levelname for one in told] == [level]


NO_SUCH_PATH = HttpResponse(404, b"")
# Heads of what the real servers said: vLLM 0.32, SGLang 0.5.23 (its source), Dynamo 1.6.1, ThunderAgent
# a7eef77, vLLM Router 0.1.17.
MODELS = '{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"%s"}]}'


def says(health: object = None, owner: str | None = None, **more: object) -> dict[str, HttpResponse]:
    """Answers by their paths. Texts are those of health pages."""
    pages = {"/v1/models": owner and MODELS % owner, "/health": health, **more}
    texts = {path: page for path, page in pages.items() if page is not None}
    return {
        path: HttpResponse(200, page.encode()) if isinstance(page, str) else page
        for path, page in texts.items()
    }


DYNAMO_HEALTH = '{"status":"healthy","endpoints":["dyn://dynamo.backend.generate"],"instances":[]}'
ROUTER_MODE = '{"status":"ok","router_mode":"tr","scheduling_enabled":true,"backends":[],"programs_count":0}'
DIAGNOSTICS = "/scheduling/diagnostics"
ORDER = '"resume_order":"mru","retained_requests":0'
PEERS = {
    "vllm": says("", "vllm"),
    "sglang": says(owner="sglang"),
    "dynamo": says(DYNAMO_HEALTH, "nvidia"),
    "thunderagent": says(ROUTER_MODE, "vllm"),  # models of its backend
    "vllm_router": says(
        "All servers healthy", "vllm",
        **{DIAGNOSTICS: f'{{"enabled":true,"binding_only":false,{ORDER},"ranks":[]}}'},
    ),
}  # fmt: skip


UNCERTAIN = (
    says(owner="nvidia"),  # others at NVIDIA own models too
    says(DYNAMO_HEALTH),
    says(**{"/v1/models": '{"data":[{"owned_by":"sglang"},{"owned_by":"vllm"}]}'}),  # a mixed fleet
    says(**{"/v1/models": '{"data":"sglang"}'}),
    says(**{"/v1/models": '{"data":[["sglang"]]}'}),
    says(**{"/v1/models": HttpResponse(401, (MODELS % "sglang").encode())}),
    says(OSError("gone"), **{"/v1/models": OSError("gone")}),
    says('{"status":"ok","programs_count":1}'),
    says("[" * 100_000),
    says(HttpResponse(200, b"\xff")),
    says(**{DIAGNOSTICS: f'{{"enabled":false,{ORDER}}}'}),
    says(**{DIAGNOSTICS: "[1]"}),
)


@pytest.mark.parametrize(
    ("answer", "pages", "dialect"),
    [
        *((HttpResponse(200, body), {}, "sojourn") for body in OURS),
        *((HttpResponse(200, body), {}, "vllm") for body in NOT_OURS),
        *((HttpResponse(status, b""), {}, "vllm") for status in (404, 405)),
        *((HttpResponse(status, b""), {}, None) for status in (401, 500, 307)),
        (OSError("refused"), {}, None),
        *((NO_SUCH_PATH, pages, peer) for peer, pages in PEERS.items()),
        *((NO_SUCH_PATH, pages, "vllm") for pages in UNCERTAIN),
    ],
)
def test_a_server_is_taken_for_what_it_certainly_is(answer, pages, dialect):
    server = Says(answer, **pages)
    assert probe_dialect(server, timeout_s=1) == dialect
    assert len(server.asked) == len(set(server.asked)) <= 4


def test_a_stock_server_gets_headers_only_and_no_events(monkeypatch):
    monkeypatch.setattr(event_sender, "FIRST_STOCK_PAUSE_S", 3600.0)
    with FakeServer(sojourn=False) as server:
        sojourn.init(server.url)
        with sojourn.program("p") as p:
            assert sojourn.request_parts() == ({}, {"X-Session-ID": p.id})
        assert sojourn.flush(60)
        assert server.probes == 4  # ours, and three by which its peers would be known
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
            assert sojourn.flush(60)
        assert (sojourn.stats().dialect, sojourn.stats().dialect_known) == ("sojourn", True)


@pytest.mark.parametrize("probe_timeout_s", [0.0, 0.2])
def test_init_waits_no_longer_than_it_may(probe_timeout_s, monkeypatch):
    waits = []

    class Answered(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            return False

    monkeypatch.setattr(dialect_probe, "threading", SimpleNamespace(Event=Answered))
    with FakeServer() as server:
        server.probe_delay_s = 60
        sojourn.init(server.url, probe_timeout_s=probe_timeout_s)
        assert waits == [probe_timeout_s]
        server._released.set()


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


@pytest.mark.parametrize("configure", ["", "logging.basicConfig(format='%(name)s: %(message)s')"])
def test_a_server_that_does_not_answer_is_named_and_so_is_the_sender(python, configure):
    address = refusing_url()
    code = f"""
    import logging, sojourn
    {configure}
    sojourn.init({address.replace("//", "//me:secret@")!r}, probe_timeout_s=5)
    """
    said = python(code).stderr
    assert f"sojourn: no answer from {address} ([Errno" in said
    assert "; the agent continues without it; the SDK tries again when it sends events" in said
    assert "secret" not in said
    assert "sojourn: sojourn" not in said
