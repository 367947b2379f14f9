"""One gateway that serves several providers at one port, each below a path of its own."""

from __future__ import annotations

import logging

import pytest
import sojourn
from openai import OpenAI
from sojourn import request_warnings
from sojourn.config import Config, Environment
from sojourn.llm_paths import LLM_PATHS
from sojourn.testing import FakeServer

MESSAGES = [{"role": "user", "content": "hi"}]


def ask(url: str, **settings: str) -> None:
    with OpenAI(base_url=url, api_key="k", max_retries=0, **settings) as client:
        client.chat.completions.create(model="m", messages=MESSAGES)


def session_ids(server: FakeServer) -> list[str | None]:
    """The program id in the header of each LLM request. The server also notes events below a path here."""
    return [r.headers.get("x-session-id") for r in server.requests if r.path.endswith("/chat/completions")]


@pytest.mark.parametrize("given", ["/vllm", "/vllm/", "/vllm/v1", "/vllm/v1/"])
def test_only_requests_below_the_path_of_the_url_get_our_fields(server: FakeServer, given: str) -> None:
    sojourn.init(server.url + given, dialect="vllm")
    with sojourn.program() as p:
        for path in ("/vllm/v1", "/vllm/v1/", "/vllm/eu/v1", "/openai/v1", "/vllm2/v1", "/v1"):
            ask(server.url + path)
    assert session_ids(server) == [p.id] * 3 + [None] * 3
    assert sojourn.stats()["requests_started"] == 3


def test_an_absolute_url_counts_with_its_own_path(server: FakeServer) -> None:
    sojourn.init(server.url + "/vllm", dialect="vllm")
    with sojourn.program() as p, OpenAI(base_url=server.url + "/vllm/v1", api_key="k") as client:
        for path in ("/openai/v1", "/vllm/v1"):
            url = f"{server.url}{path}/chat/completions"
            client.post(url, body={"model": "m", "messages": MESSAGES}, cast_to=object)
    assert session_ids(server) == [None, p.id]


def test_a_client_is_judged_anew_after_another_init(server: FakeServer) -> None:
    with OpenAI(base_url=server.url + "/openai/v1", api_key="k", max_retries=0) as client:
        for given, tagged in (("/vllm", False), ("/openai", True), ("", True), ("/vllm", False)):
            sojourn.init(server.url + given, dialect="vllm")
            with sojourn.program() as p:
                for _ in range(2):
                    client.chat.completions.create(model="m", messages=MESSAGES)
            assert session_ids(server)[-2:] == [p.id if tagged else None] * 2


def test_a_url_without_a_path_names_the_whole_host(server: FakeServer) -> None:
    sojourn.init(server.url + "/v1", dialect="vllm")
    with sojourn.program() as p:
        ask(server.url + "/openai/v1")
    assert session_ids(server) == [p.id]


def test_a_replica_at_another_path_gets_the_program_and_no_events(server: FakeServer) -> None:
    sojourn.init(server.url, hosts=[server.url + "/replica/v1"], dialect="sojourn")
    sojourn.runtime.session().event_sender._linger_s = 30
    with sojourn.program() as p:
        ask(server.url + "/replica/v1")
        ask(server.url + "/v1")
    replica, home = server.requests
    assert replica.context.program_id == home.context.program_id == p.id
    assert (replica.events, len(home.events)) == ([], 1)


def test_listeners_learn_host_and_port_alone(server: FakeServer) -> None:
    from sojourn.listeners import ProgramListener, add_listener, remove_listener

    hosts = []

    class Hears(ProgramListener):
        def request_started(self, request):
            hosts.append(request.host)

    sojourn.init(server.url + "/vllm", dialect="vllm")
    add_listener(hears := Hears())
    try:
        with sojourn.program():
            ask(server.url + "/vllm/v1")
    finally:
        remove_listener(hears)
    assert hosts == [sojourn.runtime.session().config.host]
    assert "/" not in hosts[0]


def test_the_warning_of_unlisted_requests_names_the_path(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_warnings, "_unsaid", {"unlisted": True})
    sojourn.init(server.url + "/vllm", dialect="vllm")
    caplog.set_level(logging.WARNING, "sojourn")
    with sojourn.program():
        for _ in range(request_warnings.UNLISTED_REQUESTS):
            ask(server.url + "/openai/v1")
    here = server.url.removeprefix("http://")
    (text,) = (record.getMessage() for record in caplog.records if record.name == "sojourn")
    assert f"3 requests went to {here}/openai and none to {here}/vllm, " in text
    assert f'hosts=["{here}/openai"]' in text


@pytest.mark.parametrize(
    ("path", "base"),
    [
        *((f"/b{end}", "/b") for end in LLM_PATHS),
        *((f"/b/v1{end}", "/b") for end in LLM_PATHS),
        *((f"/v1{end}", "") for end in LLM_PATHS),
        *((end, "") for end in LLM_PATHS),
        ("/a/v1/b/v1/chat/completions", "/a/v1/b"),
    ],
)
def test_the_warning_names_what_hosts_takes(
    path: str, base: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_warnings, "_unsaid", {"unlisted": True})
    sojourn.init("http://gw.invalid/a", dialect="vllm")
    session = sojourn.runtime.session()
    with sojourn.program() as p:
        for _ in range(request_warnings.UNLISTED_REQUESTS):
            request_warnings.warn_unlisted_host(session, p, "gw.invalid:80", path, "gw.invalid:80")
    assert f'hosts=["gw.invalid:80{base}"]' in caplog.text
    hosts = [f"gw.invalid:80{base}"]
    assert Config.resolve("http://gw.invalid/x", hosts=hosts).listed("gw.invalid:80", path) == hosts[0]


@pytest.mark.parametrize(
    ("url", "hosts", "path", "listed"),
    [
        ("http://gw", [], "/anything", "gw:80"),
        ("http://gw/v1", [], "/anything", "gw:80"),
        ("http://gw/llm/v1", [], "/llm/v1/completions", "gw:80/llm"),
        ("http://gw/llm/v1", [], "/llm", "gw:80/llm"),
        ("http://gw/llm/v1", [], "/llm2/v1/completions", None),
        ("http://gw/llm/v1", [], "/LLM/v1/completions", None),
        ("http://gw/llm/v1", [], "/v1/completions", None),
        ("http://gw/a/b", [], "/a/b/v1/completions", "gw:80/a/b"),
        ("http://gw/a/b", [], "/a/v1/completions", None),
        ("http://gw/a%20b", [], "/a b/v1/completions", "gw:80/a b"),
        ("http://gw/a", ["gw"], "/a/v1/completions", "gw:80/a"),
        ("http://gw/a", ["gw"], "/b/v1/completions", "gw:80"),
        ("http://gw/a", ["gw:80/b/v1"], "/b/v1/completions", "gw:80/b"),
        ("http://gw/a", ["http://gw/b"], "/c/v1/completions", None),
        ("http://other/a", ["http://gw/"], "/c/v1/completions", "gw:80"),
        ("http://other", [], "/v1/completions", None),
    ],
)
def test_the_entry_of_a_request_is_that_with_the_longest_path(
    url: str, hosts: list[str], path: str, listed: str | None
) -> None:
    assert Config.resolve(url, hosts=hosts, environment=Environment()).listed("gw:80", path) == listed
