"""What the gateway counts of a request, whatever its client writes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sojourn_server.gateway.http import generation_request
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.generation_request import (
    INITIAL_TOKENS_PER_BYTE,
    MAX_EMBEDDED_FILE_TOKENS,
    MAX_EMBEDDED_FILES,
    GenerationRequest,
    PromptSizeEstimator,
    parse_generation_request,
)
from sojourn_server.gateway.http.prefill_decode_bodies import decode_only_body
from sojourn_server.routing.tenant_statistics import MAX_TENANTS


def parsed(body: Any, api: ClientApi = ClientApi.CHAT) -> GenerationRequest:
    return parse_generation_request(api, body if isinstance(body, bytes) else json.dumps(body).encode(), None)


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def tokens(body: Any, api: ClientApi = ClientApi.CHAT) -> int:
    return PromptSizeEstimator().tokens(parsed(body, api))


# -- token ids --------------------------------------------------------------------


@pytest.mark.parametrize("spaces", [0, 63, 64, 5000])
def test_token_ids_after_spaces_are_counted(spaces: int) -> None:
    body = b'{"prompt":[' + b" " * spaces + b",".join([b"7"] * 50_000) + b"]}"
    question = parsed(body, ClientApi.COMPLETIONS)
    assert (question.prompt_tokens, question.is_exact) == (50_000, True)


@pytest.mark.parametrize("spaces", [0, 63, 64, 5000])
def test_several_prompts_after_spaces_are_several(spaces: int) -> None:
    body = b'{"prompt":[' + b" \n" * spaces + b"[1,2],[3]]}"
    question = parsed(body, ClientApi.COMPLETIONS)
    assert (question.prompt_tokens, question.is_batch, question.is_exact) == (3, True, False)
    assert decode_only_body(ClientApi.COMPLETIONS, body) is not None


def test_an_empty_list_has_no_tokens() -> None:
    assert parsed(b'{"prompt":[' + b" " * 5000 + b"]}", ClientApi.COMPLETIONS).prompt_tokens == 0


def test_token_ids_that_the_engine_shortens_are_no_exact_length() -> None:
    """vLLM serves a prompt beyond its context with ``truncate_prompt_tokens``; the gateway refused it."""
    for shortened in (None, -1, 0, 2, "2"):
        body = {"prompt": [1, 2, 3], "truncate_prompt_tokens": shortened}
        assert parsed(body, ClientApi.COMPLETIONS).is_exact is (shortened is None)


@pytest.mark.parametrize(
    ("api", "more", "learns"),
    [
        (ClientApi.CHAT, {"truncate_prompt_tokens": 10}, False),
        (ClientApi.RESPONSES, {"truncation": "auto"}, False),
        (ClientApi.RESPONSES, {"truncation": "disabled"}, True),
        (ClientApi.MESSAGES, {"truncate_prompt_tokens": 10}, True),
    ],
)
def test_of_a_shortened_prompt_no_length_is_learnt(
    api: ClientApi, more: dict[str, Any], learns: bool
) -> None:
    sizes = PromptSizeEstimator()
    text = chat("word " * 1000, input="word " * 1000)
    before = sizes.tokens(parsed(text, api))
    for _ in range(20):
        sizes.learn(parsed({**text, **more}, api), 10)
    assert (sizes.tokens(parsed(text, api)) < before) is learns


# -- text and embedded files ------------------------------------------------------

BASE64 = "data:image/png;base64," + "A" * 480_000
JUST_TEXT = [
    chat("data: {}\n\n" * 48_000),
    chat("data:" + "x" * 480_000),
    chat("data:text/plain," + "x" * 480_000),
    chat(BASE64),
    chat([{"type": "text", "text": BASE64}]),
    chat('{"url": "' + BASE64 + '"}'),
    chat("hi", tools=[{"type": "function", "function": {"name": "f", "parameters": {"url": BASE64}}}]),
]


@pytest.mark.parametrize("body", JUST_TEXT, ids=range(len(JUST_TEXT)))
def test_text_that_looks_like_an_embedded_file_counts_as_text(body: dict[str, Any]) -> None:
    assert tokens(body) >= 480_000 * INITIAL_TOKENS_PER_BYTE


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": BASE64}},
        {"type": "input_image", "image_url": BASE64},
        {"type": "file", "file": {"file_data": "data:application/pdf;name=a.pdf;base64," + "A" * 480_000}},
    ],
)
def test_an_embedded_file_counts_as_an_image(part: dict[str, Any]) -> None:
    without = tokens(chat([{"type": "text", "text": "hi"}]))
    one, two = (tokens(chat([{"type": "text", "text": "hi"}, *[part] * count])) for count in (1, 2))
    assert MAX_EMBEDDED_FILE_TOKENS <= one - without <= MAX_EMBEDDED_FILE_TOKENS + 100
    assert two - one >= MAX_EMBEDDED_FILE_TOKENS
    assert tokens(json.dumps(chat([part])).replace("/", "\\/").encode()) < 2 * MAX_EMBEDDED_FILE_TOKENS


def test_a_small_embedded_file_counts_no_more_than_its_text() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert tokens(chat([part])) <= len(json.dumps(chat([part]))) * INITIAL_TOKENS_PER_BYTE


@pytest.mark.parametrize("piece", ['"url":"data:a/b;base64,A', '"url" ', '"data', '"url":"data:', '\\"'])
def test_hostile_text_is_counted_at_once(piece: str) -> None:
    """In quadratic time, the test would take until its timeout."""
    body = json.dumps(chat("x")).replace('"x"', json.dumps(";base64," + piece * 200_000)).encode()
    assert tokens(body) > 100_000


@pytest.mark.parametrize("at", range(-4, 5))
def test_files_and_signs_of_media_are_found_wherever_slices_of_a_body_meet(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_request, "SLICE_BYTES", 64)
    url = "data:image/png;base64," + "A" * 480_000
    for part in ({"type": "input_image", "image_url": url}, {"type": "file", "file": {"file_data": url}}):
        for fill in range(at * 8 + 32, at * 8 + 40):
            body = chat([{"type": "text", "text": "x" * fill}, part, part])
            assert 0 <= tokens(body) - 2 * MAX_EMBEDDED_FILE_TOKENS < 100
            assert not parsed(body).size.is_text
            assert parsed(chat("x" * fill)).size.is_text


def test_files_after_the_first_thousands_count_as_text() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 30_000}}
    most, more = (parsed(chat([part] * count)).size for count in (MAX_EMBEDDED_FILES, MAX_EMBEDDED_FILES + 9))
    assert len(most.file_bytes) == len(more.file_bytes) == MAX_EMBEDDED_FILES


@pytest.mark.parametrize(
    "body",
    [chat("x" * 9000), chat([{"type": "image_url", "image_url": {"url": BASE64}}]), {"prompt": [1, 2, 3]}],
)
def test_a_prompt_is_measured_once(body: dict[str, Any]) -> None:
    question = parsed(body, ClientApi.COMPLETIONS if "prompt" in body else ClientApi.CHAT)
    rest, sizes, others = question.without_prompt(), PromptSizeEstimator(), PromptSizeEstimator()
    assert not rest.prompt
    for _ in range(10):
        assert sizes.tokens(question) == others.tokens(rest)
        sizes.learn(question, 9000)
        others.learn(rest, 9000)


# -- fields -----------------------------------------------------------------------

JUNK = "x" * 40_000
FIELDS = {
    ClientApi.CHAT: {"messages", "tools"},
    ClientApi.COMPLETIONS: {"prompt"},
    ClientApi.RESPONSES: {"input", "instructions", "tools"},
    ClientApi.MESSAGES: {"messages", "system", "tools"},
}


@pytest.mark.parametrize("api", ClientApi)
@pytest.mark.parametrize("name", sorted(set().union(*FIELDS.values())))
def test_only_fields_of_the_requests_api_are_counted(api: ClientApi, name: str) -> None:
    question = parsed({"model": "m", name: JUNK}, api)
    assert (question.size.json_bytes > len(JUNK)) == (name in FIELDS[api])
    assert (tokens({"model": "m", name: JUNK}, api) > 1000) == (name in FIELDS[api])


# -- the answer's length ----------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "limit", "output_tokens"),
    [(9, 100, 9), (100, 9, 9), (9, None, 9), (None, 9, 9), (None, None, 0), (2**40, None, 2**31)],
)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_the_answer_is_as_long_as_the_smaller_of_hint_and_limit(
    expected: int | None, limit: int | None, output_tokens: int, name: str
) -> None:
    body = chat("hi", **{name: limit})
    if expected is not None:
        hint = {"program_id": "p", "expected_output_length": expected}
        body["vllm_xargs"] = {"agentic_context": json.dumps(hint)}
    assert parsed(body).output_tokens == output_tokens


# -- tenants ----------------------------------------------------------------------


def test_no_tenant_alone_changes_anothers_tokens_per_byte() -> None:
    sizes = PromptSizeEstimator()
    question = parsed(chat("x" * 4000))
    usual = sizes.tokens(question, "new")
    for _ in range(100):
        sizes.learn(question, 10**6, "hostile")
    assert sizes.tokens(question, "hostile") > 3 * usual
    assert sizes.tokens(question, "new") == usual
    for tenant in ("a", "b"):
        for _ in range(100):
            sizes.learn(question, 2 * usual, tenant)
    assert sizes.tokens(question, "new") == pytest.approx(2 * usual, rel=0.01), "as most tenants' are"
    for _ in range(100):
        sizes.learn(question, usual // 2, "new")
    assert sizes.tokens(question, "new") == pytest.approx(usual / 2, rel=0.01)


def test_tokens_per_byte_are_learned_of_more_tenants_than_are_kept() -> None:
    sizes = PromptSizeEstimator()
    question = parsed(chat("x" * 4000))
    usual = sizes.tokens(question, "new")
    names = [f"tenant {number}" for number in range(MAX_TENANTS + 1)]
    for _ in range(100):
        for tenant in names:
            sizes.learn(question, 2 * usual, tenant)
    assert min(sizes.tokens(question, tenant) for tenant in names) == pytest.approx(2 * usual, rel=0.01)


def test_invented_models_and_tenants_drop_no_other_tenants_tokens_per_byte() -> None:
    sizes = PromptSizeEstimator()
    question = parsed(chat("x" * 4000))
    for _ in range(100):
        sizes.learn(question, 2000, "t")
    learned = sizes.tokens(question, "t")
    for number in range(500):
        sizes.learn(parsed({**chat("x" * 4000), "model": f"m{number}"}), 100, "inventor")
    assert sizes.tokens(question, "t") == learned
