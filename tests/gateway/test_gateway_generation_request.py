"""What the gateway reads of a request: its body within limits, its program, and its length."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_harness import hint
from sojourn_server.api.client_identity import ClientIdentity
from sojourn_server.gateway.http.client_apis import ClientApi, RequestRejected
from sojourn_server.gateway.http.generation_request import (
    FILE_TOKENS,
    BodyReader,
    ClientDisconnected,
    GenerationRequest,
    PromptSizeEstimator,
    decode_only_body,
    parse_generation_request,
    with_identity,
)


def parsed(body: Any, api: ClientApi = ClientApi.CHAT, session: str | None = None) -> GenerationRequest:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_generation_request(
        api, text, {"x-session-id": session} if session else {}, reads_prefixes=True
    )


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def tokens(body: Any, api: ClientApi = ClientApi.CHAT) -> int:
    return PromptSizeEstimator().tokens(parsed(body, api))


# -- bodies -----------------------------------------------------------------------


async def test_a_body_is_read_and_counted_within_the_limits() -> None:
    bodies = BodyReader(10, 12)

    async def read(*parts: bytes, headers: dict[str, str] | None = None, leaves: bool = False) -> bytes:
        left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        left.append({"type": "http.disconnect"} if leaves else {"type": "http.request", "more_body": False})

        async def receive() -> dict[str, Any]:
            return left.pop(0)

        return await bodies.read(headers or {}, receive)

    assert await read(b"12345", b"6") == b"123456"
    assert bodies.held_bytes == 6
    for parts, headers, status in (
        ([b"x" * 11], {}, 413),
        ([], {"content-length": "11"}, 413),
        ([b"x" * 7], {}, 503),
        ([], {"content-encoding": "gzip"}, 415),
    ):
        with pytest.raises(RequestRejected) as caught:
            await read(*parts, headers=headers)
        assert caught.value.status == status
    with pytest.raises(ClientDisconnected):
        await read(b"12", leaves=True)
    assert bodies.held_bytes == 6
    bodies.free(6)
    assert await read(b"x" * 10) == b"x" * 10


# -- identity ---------------------------------------------------------------------


def test_only_what_is_needed_is_read_of_a_request_and_the_rest_stays_when_it_changes() -> None:
    own = {"agent_type": "coder" + "r" * 9000, "final": True, "tenant": "somebody else"}
    more = {"parent_program_id": "q", "deadline_seconds": 5.0, "expected_output_length": 9}
    body = {**chat("hi"), "max_tokens": 100, "session_id": "s", **hint("p", **more, sojourn=own)}
    question = parsed(body, session="header")
    assert question.program is not None
    assert (question.program.program_id, question.output_tokens, question.is_last) == ("p", 9, True)
    assert question.program.agent_type is not None
    assert len(question.program.agent_type) == 256
    assert not question.stream
    raw = json.dumps(body).encode().replace(b'"hi"', b'"hi", "odd":  1e999')
    without = with_identity(raw, lambda name: None, None)
    assert b'"odd":  1e999' in without
    assert b"session_id" not in without
    assert b'"vllm_xargs":{"other":1}' in without


@pytest.mark.parametrize(
    ("api", "own", "header", "beside", "expected"),
    [
        (ClientApi.CHAT, "own", "header", "beside", "own"),
        (ClientApi.RESPONSES, None, "header", "beside", "header"),
        (ClientApi.CHAT, "", "", "beside", "beside"),
        (ClientApi.CHAT, None, None, 7, None),
        (ClientApi.CHAT, "x" * 257, "header", None, None),
        (ClientApi.MESSAGES, "own", "header", "beside", "header"),
    ],
)
def test_the_first_name_that_an_engine_reads_counts(
    api: ClientApi, own: Any, header: str | None, beside: Any, expected: str | None
) -> None:
    body: dict[str, Any] = {"session_id": own, "vllm_xargs": {"session_id": beside}}
    assert parsed(body, api, header).program == (ClientIdentity(expected) if expected else None)
    body["vllm_xargs"] |= hint("p")["vllm_xargs"]
    assert parsed(body, api, header).program == ClientIdentity("p")


# -- lengths ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "count", "exact"),
    [
        ([1, 2, 3], 3, True),
        ([[1, 2], [3]], 3, False),
        ("a text", None, False),
        (["one", "two"], None, False),
        ([], 0, True),
    ],
)
@pytest.mark.parametrize("spaces", ["", " \n" * 50])
def test_token_ids_are_counted(prompt: Any, count: int | None, exact: bool, spaces: str) -> None:
    body = json.dumps({"prompt": prompt}).replace("[", "[" + spaces).encode()
    question = parsed(body, ClientApi.COMPLETIONS)
    assert (question.prompt_tokens, question.is_exact) == (count, exact)
    assert (decode_only_body(ClientApi.COMPLETIONS, body) is not None) == (
        prompt in ([[1, 2], [3]], ["one", "two"])
    )


@pytest.mark.parametrize(
    ("api", "more"),
    [
        (ClientApi.CHAT, {"truncate_prompt_tokens": 10}),
        (ClientApi.RESPONSES, {"truncation": "auto"}),
        (ClientApi.RESPONSES, {"previous_response_id": "r"}),
        (ClientApi.CHAT, {"messages": [{"content": [{"type": "image_url", "text": "x" * 4000}]}]}),
        (ClientApi.CHAT, {"messages": "short"}),
    ],
)
def test_of_a_prompt_that_is_not_all_text_no_length_is_learnt(api: ClientApi, more: dict[str, Any]) -> None:
    sizes, text = PromptSizeEstimator(), chat("word " * 1000, input="word " * 1000)
    before = sizes.tokens(parsed(text, api))
    sizes.learn(parsed({**text, **more}, api), 10)
    assert sizes.tokens(parsed(text, api)) == before
    assert parsed({"prompt": [1, 2], "truncate_prompt_tokens": 1}, ClientApi.COMPLETIONS).is_exact is False


def test_sizes_are_learned_by_model() -> None:
    sizes = PromptSizeEstimator()
    question, other = (
        parsed({"model": model, "prompt": "x" * 3998}, ClientApi.COMPLETIONS) for model in "ab"
    )
    assert sizes.tokens(question) == 1000
    for _ in range(100):
        sizes.learn(question, 2000)
    assert (sizes.tokens(question), sizes.tokens(other)) == (2000, 1000)
    for _ in range(100):
        sizes.learn(other, 10**9)
    assert sizes.tokens(other) <= 4000, "no answer makes it worse than a token a byte"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 480_000}},
        {"type": "file", "file": {"file_data": "data:application/pdf;name=a.pdf;base64," + "/A" * 240_000}},
    ],
)
def test_an_embedded_file_counts_as_an_image(part: dict[str, Any]) -> None:
    without = tokens(chat([{"type": "text", "text": "hi"}]))
    two = tokens(chat([{"type": "text", "text": "hi"}, part, part]))
    assert 2 * FILE_TOKENS <= two - without <= 2 * FILE_TOKENS + 100
    assert tokens(json.dumps(chat([part])).replace("/", "\\/").encode()) < 2 * FILE_TOKENS


@pytest.mark.parametrize("api", ClientApi)
@pytest.mark.parametrize("name", ["messages", "tools", "prompt", "input", "instructions", "system"])
def test_only_fields_of_the_requests_api_are_counted(api: ClientApi, name: str) -> None:
    fields = {
        ClientApi.CHAT: {"messages", "tools"},
        ClientApi.COMPLETIONS: {"prompt"},
        ClientApi.RESPONSES: {"input", "instructions", "tools"},
        ClientApi.MESSAGES: {"messages", "system", "tools"},
    }
    assert (tokens({"model": "m", name: "x" * 40_000}, api) > 1000) == (name in fields[api])


@pytest.mark.parametrize(
    ("expected", "limit", "output_tokens"),
    [(9, 100, 9), (100, 9, 9), (9, None, 9), (None, 9, 9), (None, None, 0), (None, 2**70, 2**31)],
)
@pytest.mark.parametrize(
    ("name", "api"),
    [
        ("max_tokens", ClientApi.CHAT),
        ("max_completion_tokens", ClientApi.CHAT),
        ("max_output_tokens", ClientApi.RESPONSES),
    ],
)
def test_the_answer_is_as_long_as_the_smaller_of_hint_and_limit(
    expected: int | None, limit: int | None, output_tokens: int, name: str, api: ClientApi
) -> None:
    body = chat("hi", **{name: limit}, **hint("p", expected_output_length=expected))
    assert parsed(body, api).output_tokens == output_tokens


def test_a_limit_says_nothing_where_every_client_has_to_send_one_or_where_it_is_another_apis() -> None:
    assert parsed(chat("hi", max_tokens=32_000), ClientApi.MESSAGES).output_tokens == 0
    assert parsed(chat("hi", max_output_tokens=32_000)).output_tokens == 0


def test_a_longer_prompt_begins_with_the_hashes_of_the_shorter() -> None:
    messages = [{"role": "user", "content": "x" * 3000}]
    short = parsed({"messages": messages}).prefix
    messages.append({"role": "assistant", "content": "y" * 3000})
    long = parsed({"messages": messages}).prefix
    assert len(short) == 2
    assert long[: len(short)] == short
    assert parsed({"messages": messages[1:]}).prefix[0] != short[0]
