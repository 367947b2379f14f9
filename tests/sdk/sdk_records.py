"""What a fake server was told, and what a request says."""

from __future__ import annotations

from typing import Any

import sojourn
from openai import OpenAI
from sojourn.hints import AgenticContext
from sojourn.testing import FakeServer
from sojourn.wire_codec import decode_context

MESSAGES = [{"role": "user", "content": "hi"}]


def context_of(body: dict[str, Any] | None = None) -> AgenticContext:
    """The context in a request's fields; by default, in those of a request made here, without events."""
    fields = sojourn.request_fields() if body is None else body
    return decode_context(fields["vllm_xargs"]["agentic_context"])


def told(server: FakeServer, *kinds: type) -> list[Any]:
    """The events that arrived, of these kinds if any are given, in the order of their numbers."""
    assert sojourn.flush(60)
    return [event for event in server.program_events() if isinstance(event, kinds or (object,))]


def ask(base_url: str, **more: Any) -> Any:
    """Ask by a client of its own, and read the answer."""
    with OpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
        answer = client.chat.completions.create(model="m", messages=MESSAGES, **more)
        return list(answer) if more.get("stream") else answer  # the client must be open meanwhile
