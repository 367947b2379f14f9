"""Token counts of answers, which are read only for a listener."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
from sdk_records import MESSAGES, ask
from sojourn import listeners, outgoing_request
from sojourn.listeners import ProgramListener
from sojourn.testing import FakeServer
from sojourn.token_usage import TokenUsage, of_answer, of_tail

CHAT = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def test_the_last_usage_with_numbers_counts():
    tail = event({"usage": {"prompt_tokens": 1}}) + event({"usage": CHAT}) + event({"usage": None})
    assert of_tail(tail + b"data: [DONE]\n\n") == TokenUsage(12, 3, 8)


def test_words_of_the_answer_are_not_taken_for_it():
    text = json.dumps({"usage": {"prompt_tokens": 99}})
    assert of_tail(event({"choices": [{"delta": {"content": text}}]})) is None
    assert of_tail(event({"usage": CHAT, "choices": [{"delta": {"content": text}}]})) == TokenUsage(12, 3, 8)


def test_objects_of_the_client_and_raw_responses():
    details = SimpleNamespace(cached_tokens=5)
    recorded = SimpleNamespace(input_tokens=7, output_tokens=2, input_tokens_details=details)
    assert of_answer(SimpleNamespace(usage=recorded)) == TokenUsage(7, 2, 5)
    raw = SimpleNamespace(http_response=SimpleNamespace(content=json.dumps({"usage": CHAT}).encode()))
    assert of_answer(raw) == TokenUsage(12, 3, 8)
    assert of_answer(object()) is None
    assert of_answer(SimpleNamespace(usage=SimpleNamespace(prompt_tokens=None))) is None


class UsageRecorder(ProgramListener):
    def __init__(self, wants_usage: bool) -> None:
        self.wants_usage = wants_usage
        self.heard: list[tuple[str, TokenUsage | None, str | None]] = []

    def request_ended(self, request, how):
        self.heard.append((how, request.usage, request.model))


def anthropic(server: FakeServer, *, raw: bool = False, stream: bool = False) -> None:
    fields = {"model": "m", "max_tokens": 9, "messages": MESSAGES}
    with pytest.importorskip("anthropic").Anthropic(api_key="k", base_url=server.url) as client:
        if stream:
            with client.messages.stream(**fields) as events:
                events.get_final_text()
        else:
            (client.messages.with_raw_response if raw else client.messages).create(**fields)


WAYS = {
    "chat": lambda server: ask(server.base_url),
    "stream": lambda server: ask(server.base_url, stream=True, stream_options={"include_usage": True}),
    # Whose input tokens do not include the cached ones.
    "messages": anthropic,
    "raw messages": partial(anthropic, raw=True),
    "stream of messages": partial(anthropic, stream=True),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_usage_is_read_only_for_a_listener(online, monkeypatch, way):
    looked = []
    for name, read in (("of_tail", of_tail), ("of_answer", of_answer)):
        monkeypatch.setattr(outgoing_request, name, lambda given, read=read: looked.append(1) or read(given))
    for wants_usage, usage in ((False, None), (True, TokenUsage(12, 3, 8))):
        listeners.add_listener(ear := UsageRecorder(wants_usage))
        way(online)
        listeners.remove_listener(ear)
        assert ear.heard == [("ended", usage, "m")]
        assert len(looked) == wants_usage
