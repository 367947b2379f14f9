"""Token counts of answers, which are read only for a listener."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import sojourn
from sdk_records import ask
from sojourn import listeners, outgoing_request
from sojourn.listeners import ProgramListener
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


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_read_only_for_a_listener(server, monkeypatch, stream):
    looked = []
    monkeypatch.setattr(outgoing_request, "of_tail", lambda tail: looked.append(tail) or of_tail(tail))
    monkeypatch.setattr(
        outgoing_request, "of_answer", lambda result: looked.append(result) or of_answer(result)
    )
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    def heard_by(ear: UsageRecorder) -> None:
        listeners.add_listener(ear)
        with sojourn.program("p"):
            ask(server.base_url, **more)
        listeners.remove_listener(ear)

    sojourn.init(server.url)
    heard_by(deaf := UsageRecorder(wants_usage=False))
    assert looked == []
    heard_by(keen := UsageRecorder(wants_usage=True))
    assert deaf.heard == [("ended", None, "m")]
    assert keen.heard == [("ended", TokenUsage(12, 3, 8), "m")]
    assert len(looked) == 1
