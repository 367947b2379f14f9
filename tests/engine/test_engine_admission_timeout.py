"""Clients of a real server whose programs find no place on the device: each reads why, whatever its route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from engine_tools import SMALL_SERVER
from sojourn_server.api.refusal_middleware import refusal_message
from sojourn_server.launch.engine_server import EngineServer

pytestmark = pytest.mark.engine

GATE_TIMEOUT_S = 0.5
TOLD = refusal_message(GATE_TIMEOUT_S)
TOKENS = 4096
ARGS = (
    "--block-size", "32", "--num-gpu-blocks-override", str(TOKENS // 32 + 1), "--max-model-len", str(TOKENS),
    "--sojourn-option", f"gate_timeout_s={GATE_TIMEOUT_S}", "--sojourn-option", "allow_missing_tiers=true",
)  # fmt: skip
HELD = {"prompt": "other " * 1000, "max_tokens": 3000, "ignore_eos": True}
LONG = "word " * 3300
"""No prompt of it has room beside what is held."""
MESSAGES: Any = [{"role": "user", "content": LONG}]
OPENAI_TOLD = {"error": {"message": TOLD, "type": "ServiceUnavailableError", "param": None, "code": 503}}
PLAIN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": MESSAGES, "max_tokens": 4}, OPENAI_TOLD),
    "several prompts": ("completions", {"prompt": [LONG, LONG + "x"], "max_tokens": 4}, OPENAI_TOLD),
    "response": ("responses", {"input": LONG, "max_output_tokens": 16}, OPENAI_TOLD),
    "message": (
        "messages",
        {"messages": MESSAGES, "max_tokens": 4},
        {"type": "error", "error": {"type": "ServiceUnavailableError", "message": TOLD}},
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[EngineServer]:
    pytest.importorskip("vllm")
    with EngineServer("tiny", policy="mori", serve_args=ARGS, env=SMALL_SERVER) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: EngineServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v1/", timeout=120, trust_env=False) as client:
        yield client


def post(http: httpx.Client, program: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return http.post(path, json={"model": "tiny", **body}, headers={"x-session-id": program})


@contextmanager
def full_device(http: httpx.Client) -> Iterator[None]:
    """A program is being answered meanwhile."""
    body = {"model": "tiny", "stream": True, **HELD}
    with http.stream("POST", "completions", json=body, headers={"x-session-id": "full"}) as answer:
        lines = answer.iter_lines()  # kept, since the answer is closed with it
        assert next(lines).startswith('data: {"id"')
        yield


def chat_stream(client: openai.OpenAI, program: str) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, extra_headers={"x-session-id": program}
    )
    with pytest.raises(openai.APIError) as raised:
        list(stream)
    assert raised.value.message == TOLD
    assert raised.value.body == OPENAI_TOLD["error"]


def completion_stream(client: openai.OpenAI, program: str) -> None:
    stream = client.completions.create(
        model="tiny", prompt=LONG, stream=True, extra_headers={"x-session-id": program}
    )
    with pytest.raises(openai.APIError) as raised:
        list(stream)
    assert raised.value.message == TOLD


def response_stream(client: openai.OpenAI, program: str) -> None:
    stream = client.responses.create(
        model="tiny", input=LONG, stream=True, extra_headers={"x-session-id": program}
    )
    events = list(stream)
    assert [event.type for event in events] == ["response.created", "response.in_progress", "error"]
    assert [event.sequence_number for event in events] == [0, 1, 2]
    assert events[-1].message == TOLD  # type: ignore[union-attr]


def chat(client: openai.OpenAI, program: str) -> None:
    with pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_headers={"x-session-id": program}
        )
    assert raised.value.status_code == 503
    assert TOLD in raised.value.message


OF_OPENAI = (chat, chat_stream, completion_stream, response_stream)


def message_stream(http: httpx.Client, program: str) -> None:
    path, body, told = PLAIN["message"]
    last = post(http, program, path, {"stream": True, **body}).text.split("\n\n")[-2]
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == told


def test_all_who_are_refused_read_why(server: EngineServer, http: httpx.Client) -> None:
    client = openai.OpenAI(base_url=http.base_url, api_key="none", max_retries=0, http_client=http)
    # What is imported and built when first asked for takes longer than the device stays full.
    short: Any = {"model": "tiny", "stream": True}
    list(client.chat.completions.create(messages=[{"role": "user", "content": "a"}], max_tokens=1, **short))
    list(client.completions.create(prompt="a", max_tokens=1, **short))
    list(client.responses.create(input="a", max_output_tokens=1, **short))
    with ThreadPoolExecutor(12) as pool, full_device(http):
        plain = {name: pool.submit(post, http, name, path, body) for name, (path, body, _) in PLAIN.items()}
        looked_at = [pool.submit(look, client, look.__name__) for look in OF_OPENAI]
        looked_at.append(pool.submit(message_stream, http, "message stream"))
        for name, (_, _, told) in PLAIN.items():
            answer = plain[name].result()
            assert answer.status_code == 503, (name, answer.text)
            assert answer.json() == told
            assert int(answer.headers["retry-after"]) > 0
        for each in looked_at:
            each.result()
    # The same is answered once there is room.
    path, body, _ = PLAIN["several prompts"]
    assert post(http, "several prompts", path, body).status_code == 200
