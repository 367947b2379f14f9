"""The anthropic client against a real HTTP server. What it shares with the openai client is tested there."""

from __future__ import annotations

import pytest
import sojourn

anthropic = pytest.importorskip("anthropic")

ASK = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
SAID = "hello from the fake"


@pytest.fixture
def client(online):
    with anthropic.Anthropic(api_key="k", base_url=online.url, max_retries=2) as client:
        yield client


def test_every_way_to_ask_is_one_turn_and_a_count_of_tokens_is_none(online, client):
    online.fail_next = 1
    with sojourn.program("p") as p:
        assert client.messages.create(**ASK).content[0].text == SAID  # at the second attempt
        assert client.messages.with_raw_response.create(**ASK).parse().content[0].text == SAID
        with client.messages.stream(**ASK) as events:
            assert events.get_final_text().split() == SAID.split()
        with client.messages.create(stream=True, **ASK) as events:
            next(iter(events))
        assert client.beta.messages.create(**ASK).content[0].text == SAID
        assert client.messages.count_tokens(model="m", messages=ASK["messages"]).input_tokens == 12
    *turns, count = online.requests
    assert count.path == "/v1/messages/count_tokens"
    assert (count.context, count.headers.get("x-session-id")) == (None, None)
    assert {turn.context.program_id for turn in turns} == {p.id} == {t.headers["x-session-id"] for t in turns}
    assert len(turns) == len({turn.context.request_id for turn in turns}) + 1 == 6
    stats = sojourn.stats()
    assert (stats["requests_started"], stats["requests_ended"], stats["requests_closed_early"]) == (5, 4, 1)


def test_other_servers_get_headers_only(server):
    sojourn.init(server.url, dialect="thunderagent")
    with anthropic.Anthropic(api_key="k", base_url=server.url) as client, sojourn.program() as p:
        client.messages.create(**ASK)
        (request,) = server.requests  # before that of the program's end
    assert request.headers["x-session-id"] == p.id
    assert request.body == ASK
