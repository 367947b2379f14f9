"""One gateway that serves several providers at one port, each below a path of its own."""

from __future__ import annotations

import pytest
import sojourn
from openai import OpenAI
from sojourn.config import Config, Environment
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


def test_a_replica_at_another_path_gets_the_program_and_no_events(server: FakeServer) -> None:
    sojourn.init(server.url, hosts=[server.url + "/replica/v1"], dialect="sojourn")
    sojourn.runtime.session().event_sender._linger_s = 30
    with sojourn.program() as p:
        ask(server.url + "/replica/v1")
        ask(server.url + "/v1")
    replica, home = server.requests
    assert replica.context.program_id == home.context.program_id == p.id
    assert (replica.events, len(home.events)) == ([], 1)


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
