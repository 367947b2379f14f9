"""What goes to the prefill engine and to the decode engine of one request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from sojourn_server.gateway.http.apis import Api
from sojourn_server.gateway.http.legs import decode_body, prefill_body, read_prefilled
from sojourn_server.gateway.http.question import BadQuestion, read_question

CONTEXT = json.dumps({"program_id": "p", "sojourn": {"events": []}})


def asked(**more: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}).encode()


@pytest.mark.parametrize(
    ("api", "given_length", "set_length"),
    [
        (Api.CHAT, {"max_tokens": 500}, {"max_completion_tokens": 1}),
        (Api.CHAT, {"max_completion_tokens": 500}, {"max_completion_tokens": 1}),
        (Api.COMPLETIONS, {"max_tokens": 500}, {"max_tokens": 1}),
        (Api.RESPONSES, {"max_output_tokens": 500}, {"max_output_tokens": 1}),
        (Api.MESSAGES, {"max_tokens": 500}, {"max_tokens": 1}),
        (Api.MESSAGES, {}, {"max_tokens": 1}),
    ],
)
def test_the_prefill_engine_computes_the_prompt_and_one_token(
    api: Api, given_length: dict[str, int], set_length: dict[str, int]
) -> None:
    body = asked(
        **given_length, stream=True, stream_options={"include_usage": True}, n=3, min_tokens=9, seed=7,
        vllm_xargs={"agentic_context": CONTEXT, "x": 1},
        kv_transfer_params={"peer": "somebody else's"},
    )  # fmt: skip
    assert json.loads(prefill_body(api, body, "t1", "tcp:d:1", 0.25)) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": False,
        "seed": 7,
        "vllm_xargs": {"x": 1},
        **set_length,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "transfer": "t1",
            "peer": "tcp:d:1",
            "decode_share": 0.25,
        },
    }


def test_what_it_answers_goes_to_the_decode_engine_with_the_clients_own_body() -> None:
    told = {"do_remote_prefill": True, "transfer": "t1", "nested": {"a": [1, 2]}}
    answer = json.dumps({"id": "x", "choices": [], "kv_transfer_params": told}).encode()
    assert read_prefilled(answer) == told
    body = asked(stream=True, max_tokens=500)
    assert json.loads(decode_body(body, told)) == {**json.loads(body), "kv_transfer_params": told}


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": 3}', b"{}", b"\xff"],
)
def test_an_engine_that_says_nothing_of_kv_is_no_prefill_engine(answer: bytes) -> None:
    assert read_prefilled(answer) is None


def test_without_word_of_it_the_decode_engine_gets_the_body_as_it_came() -> None:
    body = b'{ "odd":1e999,"model" : "tiny"}'
    assert decode_body(body, None) is body


def test_what_a_client_says_of_kv_is_not_passed_on() -> None:
    body = asked(kv_transfer_params={"do_remote_prefill": True, "transfer": "another's"})
    assert json.loads(decode_body(body, None)) == json.loads(asked())
    told = {"transfer": "mine"}
    assert json.loads(decode_body(body, told))["kv_transfer_params"] == told


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda inner: st.lists(inner)
        ),
        max_size=6,
    )
)
def test_all_else_goes_to_both_as_it_came(more: dict[str, Any]) -> None:
    lengths = {"max_tokens", "max_completion_tokens", "min_tokens"}
    of_the_answer = {"stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "echo"}
    changed = {"kv_transfer_params", "vllm_xargs", "model", "messages"} | lengths | of_the_answer
    kept = {key: value for key, value in more.items() if key not in changed}
    body = asked(**kept)
    try:
        read_question(Api.CHAT, body, None)
    except BadQuestion:
        reject()
    for sent in (prefill_body(Api.CHAT, body, "t", "tcp:d:1", 0.0), decode_body(body, {"transfer": "t"})):
        document = json.loads(sent)
        assert {key: document[key] for key in kept} == kept
