"""What goes to a prefill engine is what vLLM takes: its own protocol classes read it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.generation_request import decode_only_body, prefill_body

pytest.importorskip("vllm")

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOLS = {"tools": [TOOL], "tool_choice": "required"}
KINDS: dict[ClientApi, Any] = {
    ClientApi.CHAT: ChatCompletionRequest,
    ClientApi.COMPLETIONS: CompletionRequest,
    ClientApi.RESPONSES: ResponsesRequest,
    ClientApi.MESSAGES: AnthropicMessagesRequest,
}
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
    request = KINDS[api](**json.loads(body))
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
    # Also of what has no first leg: whoever makes one of it asks nothing that cannot be.
    request, sampled = taken(api, prefill_body(api, body, "t", "tcp:x:1", 0.0))
    assert request.kv_transfer_params["do_remote_decode"] is True
    assert sampled is None or (sampled.n, sampled.min_tokens, sampled.prompt_logprobs) == (1, 0, None)
