"""What goes to the prefill engine and to the decode engine of one request."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.engine_client import EngineAnswer, ReplicaRequestError
from sojourn_server.gateway.http.generation_request import (
    _ANSWER_FIELDS,
    InvalidGenerationRequest,
    decode_body,
    decode_only_body,
    parse_generation_request,
    parse_transfer_params,
    prefill_body,
)

CONTEXT = json.dumps({"program_id": "p", "sojourn": {"events": []}})


def asked(**more: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}).encode()


@pytest.mark.parametrize(
    ("api", "given_length", "set_length"),
    [
        (ClientApi.CHAT, {"max_tokens": 500}, {"max_completion_tokens": 1}),
        (ClientApi.CHAT, {"max_completion_tokens": 500}, {"max_completion_tokens": 1}),
        (ClientApi.COMPLETIONS, {"max_tokens": 500}, {"max_tokens": 1}),
        (ClientApi.RESPONSES, {"max_output_tokens": 500}, {"max_output_tokens": 1, "store": False}),
        (ClientApi.MESSAGES, {"max_tokens": 500}, {"max_tokens": 1}),
        (ClientApi.MESSAGES, {}, {"max_tokens": 1}),
    ],
)
def test_the_prefill_engine_computes_the_prompt_and_one_token(
    api: ClientApi, given_length: dict[str, int], set_length: dict[str, object]
) -> None:
    body = asked(
        **given_length, stream=True, stream_options={"include_usage": True}, n=3, min_tokens=9, seed=7,
        vllm_xargs={"agentic_context": CONTEXT, "x": 1},
        kv_transfer_params={"peer": "somebody else's"}, ec_transfer_params={"x": 1}, prompt_cache_key="p",
        metadata={"user_id": "p"},
    )  # fmt: skip
    assert json.loads(prefill_body(api, body, "t1", "tcp:d:1", True)) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": False,
        "seed": 7,
        "vllm_xargs": {"agentic_context": CONTEXT, "x": 1},
        **set_length,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "transfer": "t1",
            "peer": "tcp:d:1",
            "decode_reads": True,
        },
    }


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{",
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": 3}',
        b'{"kv_transfer_params": {"transfer": "t1"}}',
        b'{"kv_transfer_params": {"do_remote_prefill": 1}}',
        b"{}",
        b"\xff",
    ],
)
def test_an_engine_that_reports_no_kv_is_no_prefill_engine(answer: bytes) -> None:
    assert parse_transfer_params(answer) is None
    told = {"do_remote_prefill": True, "nested": {"a": [1, 2]}}
    assert parse_transfer_params(json.dumps({"id": "x", "kv_transfer_params": told}).encode()) == told


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text(max_size=8),
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.lists(st.integers(), max_size=3),
        max_size=6,
    )
)
def test_all_else_goes_to_both_as_it_came(more: dict[str, Any]) -> None:
    lengths = {"max_tokens", "max_completion_tokens", "min_tokens"}
    changed = {"kv_transfer_params", "vllm_xargs", "model", "messages", "stream", *_ANSWER_FIELDS} | lengths
    kept = {key: value for key, value in more.items() if key not in changed}
    body = asked(**kept)
    try:
        parse_generation_request(ClientApi.CHAT, body, {})
    except InvalidGenerationRequest:
        reject()
    document = json.loads(prefill_body(ClientApi.CHAT, body, "t", "tcp:d:1", False))
    assert {key: document[key] for key in kept} == kept
    told = {"do_remote_prefill": True, "transfer": "t"}
    forged = asked(**kept, kv_transfer_params={"transfer": "another's"}, ec_transfer_params={"x": 1})
    assert json.loads(decode_body(forged, told)) == {**json.loads(body), "kv_transfer_params": told}


ONE_CONTEXT = (
    (ClientApi.CHAT, {}),
    (ClientApi.CHAT, {"n": 1, "best_of": None, "use_beam_search": False, "prompt_logprobs": None}),
    (ClientApi.CHAT, {"echo": False}),
    (ClientApi.CHAT, {"logprobs": True, "top_logprobs": 3}),
    *((ClientApi.COMPLETIONS, {"prompt": prompt}) for prompt in ("a", ["a"], [1, 2, 3], [])),
    (ClientApi.COMPLETIONS, {"prompt": [[1, 2, 3]], "prompt_embeds": None}),
    (ClientApi.RESPONSES, {"n": 2}),
    (ClientApi.MESSAGES, {"n": 2}),
)
SEVERAL_CONTEXTS = (
    *((ClientApi.CHAT, more) for more in ({"n": 2}, {"n": "2"}, {"use_beam_search": True}, {"echo": True})),
    (ClientApi.CHAT, {"prompt_logprobs": 0}),
    *((ClientApi.COMPLETIONS, {"prompt": prompt}) for prompt in (["a", "b"], [[1, 2], [3]])),
    (ClientApi.COMPLETIONS, {"best_of": 3}),
    (ClientApi.COMPLETIONS, {"echo": True, "logprobs": 0}),
    (ClientApi.COMPLETIONS, {"prompt_embeds": "AAAA"}),
)


@pytest.mark.parametrize(("api", "more"), [*ONE_CONTEXT, *SEVERAL_CONTEXTS])
def test_what_has_one_context_goes_on_two_legs_and_else_whole(api: ClientApi, more: dict[str, Any]) -> None:
    sent = decode_only_body(api, asked(**more, kv_transfer_params={"peer": "x"}, ec_transfer_params={"x": 1}))
    assert (sent is None) is ((api, more) in ONE_CONTEXT)
    assert sent is None or json.loads(sent) == json.loads(asked(**more))


def has_failed(status: int, first: bytes = b"{}", is_stream: bool = False) -> bool:
    content = SimpleNamespace(at_eof=lambda: True)
    response: Any = SimpleNamespace(status=status, content=content, close=lambda: None)
    try:
        EngineAnswer(response, first, is_stream=is_stream).raise_for_failure()
    except ReplicaRequestError:
        return True
    return False


def test_an_engine_that_reports_its_failure_has_failed_and_one_that_rejects_a_request_has_not() -> None:
    statuses = (200, 400, 404, 409, 429, 500, 501, 502, 503, 504)
    assert [status for status in statuses if has_failed(status)] == [500, 502, 503, 504]


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (b'data: {"error": {"message": "x", "code": 500}}\n\n', True),
        (b'data: {"error": {"message": "x", "code": "server_error"}}\n\n', True),
        (b'event: error\ndata: {"type": "error", "error": {"type": "api_error"}}\n\n', True),
        (b'data: {"error": {"message": "x", "code": 400}}\n\n', False),
        (b"event: error\n", False),  # the rest is under way
        (b'data: {"choices": [{"delta": {"content": "error 500"}}]}\n\n', False),
        (b"", False),
    ],
)
def test_a_stream_may_begin_with_a_failure(first: bytes, expected: bool) -> None:
    assert has_failed(200, first, is_stream=True) is expected


# -- vLLM's own classes read what goes to an engine -----------------------------------

CLASSES = {
    ClientApi.CHAT: ("openai.chat_completion", "ChatCompletionRequest"),
    ClientApi.COMPLETIONS: ("openai.completion", "CompletionRequest"),
    ClientApi.RESPONSES: ("openai.responses", "ResponsesRequest"),
    ClientApi.MESSAGES: ("anthropic", "AnthropicMessagesRequest"),
}
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS = {"tools": [TOOL], "tool_choice": "required"}
ALIKE: list[dict[str, Any]] = [
    {},
    {"max_tokens": 50, "min_tokens": 20},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stop": ["x"], "stop_token_ids": [1], "ignore_eos": True, "include_stop_str_in_output": True},
    {"thinking_token_budget": 20, "max_tokens": 50},
    {"n": 3, "temperature": 1.0},
    {"n": 3, "use_beam_search": True, "length_penalty": 0.5},
    {"prompt_logprobs": 3},
    {"stream_interval": 7, "stream": True},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
    {"structured_outputs": {"json": {"type": "object"}}},
    {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}},
    {"return_token_ids": True, "return_tokens_as_token_ids": True, "priority": 3},
    {"logit_bias": {"5": 1.0}, "allowed_token_ids": [5, 6], "bad_words": ["x"]},
]
ASKED: dict[ClientApi, list[dict[str, Any]]] = {
    ClientApi.CHAT: [
        *({"messages": HI, **more} for more in ALIKE),
        {"messages": HI, "logprobs": True, "logprob_token_ids": [1, 2]},
        {"messages": HI, "logprobs": True, "top_logprobs": 3, "stream": True},
        {"messages": HI, **TOOLS, "parallel_tool_calls": False},
        {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"messages": [*HI, {"role": "assistant", "content": "a"}], "continue_final_message": True,
         "add_generation_prompt": False, "echo": True},
        {"messages": HI, "max_tokens": 9, "max_completion_tokens": 9, "reasoning_effort": "low"},
    ],
    ClientApi.COMPLETIONS: [
        *({"prompt": "x", **more} for more in ALIKE),
        {"prompt": "x", "logprobs": 2, "logprob_token_ids": [1]},
        {"prompt": "x", "echo": True, "max_tokens": 0},
        {"prompt": "x", "echo": True, "logprobs": 1},
        {"prompt": [1, 2, 3], "max_tokens": None, "suffix": ""},
        {"prompt": ["a", "b"]},
    ],
    ClientApi.RESPONSES: [
        {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"input": "x", "background": True, "store": True},
        {"input": HI, "instructions": "be", "max_output_tokens": 50, "stream": True, "truncation": "auto"},
        {"input": "x", "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_object"}}},
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
         "tool_choice": {"type": "function", "name": "f"}},
    ],
    ClientApi.MESSAGES: [
        {"messages": HI, "max_tokens": 50, "system": "be", "stop_sequences": ["x"], "stream": True},
        {"messages": HI, "max_tokens": 4000, "thinking": {"type": "enabled", "budget_tokens": 2000}},
        {"messages": HI, "max_tokens": 50, "tools": [{"name": "f", "input_schema": {"type": "object"}}],
         "tool_choice": {"type": "tool", "name": "f"}},
    ],
}  # fmt: skip


def taken(api: ClientApi, body: bytes) -> Any:
    """As vLLM reads it, down to what it samples by. Raises what vLLM raises."""
    package, name = CLASSES[api]
    pytest.importorskip("vllm")
    protocol = import_module(f"vllm.entrypoints.{package}.protocol")
    request = getattr(protocol, name)(**json.loads(body))
    if api is ClientApi.RESPONSES:
        return request, request.to_sampling_params(100, {})
    if api is ClientApi.MESSAGES:
        return request, None
    return request, request.to_sampling_params(request.max_tokens or 100, {})


@pytest.mark.parametrize(
    ("api", "asked"),
    [(api, asked) for api, several in ASKED.items() for asked in several],
    ids=lambda one: one.name if isinstance(one, ClientApi) else ",".join(one),
)
def test_what_vllm_takes_of_a_client_its_prefill_leg_takes_too(api: ClientApi, asked: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", **asked}).encode()
    _, of_client = taken(api, body)  # else it is no case of this test
    whole = decode_only_body(api, body)
    if whole is not None:
        taken(api, whole)
    elif of_client is not None:
        # What is pushed for it is taken: it is one request to the engine, and one that reads what is there.
        assert (of_client.n, bool(of_client.skip_reading_prefix_cache)) == (1, False)
    # A prefill request can also be made of a body that the gateway would not split; vLLM accepts it.
    request, sampled = taken(api, prefill_body(api, body, "t", "tcp:x:1", 0.0))
    assert request.kv_transfer_params["do_remote_decode"] is True
    assert sampled is None or (sampled.n, sampled.min_tokens, sampled.prompt_logprobs) == (1, 0, None)
