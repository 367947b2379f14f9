"""A hostile body costs the gateway no more than its bytes, and long honest bodies pass unchanged."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from sojourn.wire_codec import MAX_CONTEXT_BYTES
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.client_json import (
    LONG_VALUE,
    MAX_FIELD_NAMES,
    MAX_VALUE_BYTES,
    NOT_SCALAR,
    InvalidGenerationRequest,
    members_of,
    short_value,
)
from sojourn_server.gateway.http.generation_request import parse_generation_request
from sojourn_server.gateway.http.prefill_decode_bodies import decode_body, decode_only_body, prefill_body
from sojourn_server.gateway.http.program_id_mapper import ProgramIdMapper

BODY_BYTES = 1 << 20
EMPTY_LISTS = b"[" + b"[]," * (BODY_BYTES // 3) + b"[]]"
FIELDS = (
    "stream", "model", "session_id", "vllm_xargs", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "previous_response_id", "truncate_prompt_tokens", "truncation", "messages", "prompt", "tools", "n",
    "best_of", "use_beam_search", "prompt_logprobs", "echo", "prompt_embeds", "kv_transfer_params", "unknown",
)  # fmt: skip
SMALL_MEMBERS = b",".join(b'"%06x":0' % number for number in range(BODY_BYTES // 11))
HOSTILE = {
    **{f"lists in {name}": b'{"session_id":"p","%s":%s}' % (name.encode(), EMPTY_LISTS) for name in FIELDS},
    "lists in members of vllm_xargs": b'{"vllm_xargs":{"session_id":%s,"agentic_context":%s,"x":%s}}'
    % (EMPTY_LISTS, EMPTY_LISTS, EMPTY_LISTS),
    "texts in prompt": b'{"session_id":"p","prompt":["",' + b'"",' * (BODY_BYTES // 3) + b'""]}',
    "members": b'{"session_id":"p",' + SMALL_MEMBERS + b"}",
    "members of vllm_xargs": b'{"vllm_xargs":{"session_id":"p",' + SMALL_MEMBERS + b"}}",
    "repeated members": b'{"session_id":"p"' + b',"stream":[]' * (BODY_BYTES // 12) + b"}",
    "digits": b'{"session_id":"p","max_tokens":' + b"1" * BODY_BYTES + b"}",
    "long texts": b'{"session_id":"%s","model":"%s"}' % (b"a" * BODY_BYTES, b"b" * BODY_BYTES),
    "a long hint": b'{"vllm_xargs":{"agentic_context":"' + b"a" * BODY_BYTES + b'"}}',
}


def handle(api: ClientApi, body: bytes) -> None:
    """What a gateway of several tenants and of pairs does with a body."""
    question = parse_generation_request(api, body, None)
    steps: list[Callable[[], object]] = [
        lambda: ProgramIdMapper(["a", "b"]).request("a", body, question),
        lambda: decode_only_body(api, body),
        lambda: prefill_body(api, body, "t", "tcp:d:1", 0.5),
        lambda: decode_body(body, {}),
    ]
    for step in steps:
        with contextlib.suppress(InvalidGenerationRequest):
            step()


@pytest.mark.parametrize("what", HOSTILE)
def test_no_body_is_decoded_into_many_objects(what: str) -> None:
    """Objects took 25 times a body's memory, and all other requests waited until they were made. Now a step
    makes two copies of the body at most, and a dictionary of bounded size."""
    body = HOSTILE[what]
    for api in ClientApi:
        tracemalloc.start()
        try:
            with contextlib.suppress(InvalidGenerationRequest):
                handle(api, body)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 4 * len(body)


@pytest.mark.parametrize("within", ["%s", '{"session_id":"p","vllm_xargs":%s}'])
def test_an_object_of_too_many_members_is_refused(within: str) -> None:
    def body(count: int) -> bytes:
        members = ",".join(f'"{number:06x}":0' for number in range(count - 1))
        return (within % ('{"session_id":"p",' + members + "}")).encode()

    names = ProgramIdMapper(["a", "b"])
    for count in (MAX_FIELD_NAMES, MAX_FIELD_NAMES + 1):
        question = parse_generation_request(ClientApi.CHAT, body(count), None)
        if count <= MAX_FIELD_NAMES:
            assert b'"session_id":"a/p"' in names.request("a", body(count), question)[0]
            continue
        told = f"has an object with more than {MAX_FIELD_NAMES} field names; expected at most as many"
        with pytest.raises(InvalidGenerationRequest, match=told):
            names.request("a", body(count), question)


MANY = 3 * MAX_FIELD_NAMES
TOOL = {"type": "function", "function": {"name": "f", "parameters": {f"p{n}": {} for n in range(100)}}}


SCHEMA = {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(MANY)}}
LONG_FIELDS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "a: b"}] * MANY,
    "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "guided_json": SCHEMA,
    "guided_grammar": "root ::= a: " * MANY,
    "functions": [{"name": "f", "parameters": SCHEMA}],
    "stop": ["a:b"] * MANY,
    "user": ":" * MANY,
    "a field of a later vLLM": {"a": [{"b: c": ":"}] * MANY},
}


@pytest.mark.parametrize("name", LONG_FIELDS)
@pytest.mark.parametrize("api", ClientApi)
def test_any_field_may_have_any_number_of_names_and_colons(api: ClientApi, name: str) -> None:
    """Only an object that the gateway makes a dictionary of has a limit. Colons in other fields than a list
    of long ones counted too, so a long schema or grammar got 400."""
    body = json.dumps({"session_id": "p", name: LONG_FIELDS[name]}).encode()
    question = parse_generation_request(api, body, None)
    named, _ = ProgramIdMapper(["a", "b"]).request("a", body, question)
    for sent in (named, prefill_body(api, body, "t", "tcp:d:1", 0.5), decode_body(body, {})):
        assert bytes(members_of(sent)[name]) == bytes(members_of(body)[name])


def test_repeated_names_count_each_time() -> None:
    def body(count: int) -> bytes:
        return b"{" + b",".join([b'"unknown":0'] * count) + b"}"

    assert list(members_of(body(MAX_FIELD_NAMES))) == ["unknown"]
    with pytest.raises(InvalidGenerationRequest, match="field names"):
        members_of(body(MAX_FIELD_NAMES + 1))


@pytest.mark.parametrize("body", [b'{"a":', b"[]", b'{"\xff":1}', b'{"a":1}x', b'{"a":' + b"[" * 100_000])
def test_a_long_body_that_is_no_object_is_refused_as_a_short_one(body: bytes) -> None:
    """Long objects are decoded by other code, which counts their names."""
    told = []
    for padded in (body, b" " * (MAX_FIELD_NAMES * 5) + body):
        with pytest.raises(InvalidGenerationRequest, match="cannot be read") as found:
            members_of(padded)
        told.append(str(found.value).split(" (byte ")[0].split(" in position ")[0])
    assert told[0] == told[1]


def test_long_honest_requests_pass_as_they_came() -> None:
    honest = {
        ClientApi.CHAT: {
            "messages": [{"role": "user", "content": "a: b, [c]"}] * MANY,
            "tools": [TOOL] * 300,
            "logit_bias": {str(number): 1 for number in range(MANY)},
            "allowed_token_ids": list(range(150_000)),
        },
        ClientApi.COMPLETIONS: {"prompt": list(range(400_000)), "user": "u" * 100_000},
        ClientApi.RESPONSES: {"input": [{"role": "user", "content": "x"}] * MANY, "truncation": "disabled"},
        ClientApi.MESSAGES: {"system": "s: " * MANY, "messages": [{"role": "user", "content": "x"}] * MANY},
    }
    for api, fields in honest.items():
        hint = json.dumps({"program_id": "p"})
        body = json.dumps({"model": "m", **fields, "vllm_xargs": {"agentic_context": hint}}).encode()
        question = parse_generation_request(api, body, None)
        assert (question.program_id, question.model) == ("p", "m")
        named, _ = ProgramIdMapper(["a", "b"]).request("a", body, question)
        for sent in (named, prefill_body(api, body, "t", "tcp:d:1", 0.5), decode_body(body, {})):
            assert {name: bytes(members_of(sent)[name]) for name in fields} == {
                name: bytes(members_of(body)[name]) for name in fields
            }


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"", None),
        (b"null", None),
        (b"true", True),
        (b"12", 12),
        (b"-1.5", -1.5),
        (b'"\\u00e9"', "é"),
        (b"[]", NOT_SCALAR),
        (b'{"a":1}', NOT_SCALAR),
        (b'"' + b"x" * (MAX_VALUE_BYTES - 2) + b'"', "x" * (MAX_VALUE_BYTES - 2)),
        (b'"' + b"x" * (MAX_VALUE_BYTES - 1) + b'"', LONG_VALUE),
        (b"1" * (MAX_VALUE_BYTES + 1), LONG_VALUE),
    ],
)
def test_only_short_scalars_are_decoded(raw: bytes, value: Any) -> None:
    assert short_value(msgspec.Raw(raw)) == value


@pytest.mark.parametrize("value", [True, "true", "True", "1", 1, False, "yes", None, [], [True], {"a": 1}])
def test_a_stream_is_what_an_engine_takes_as_true(value: Any) -> None:
    body = json.dumps({"stream": value}).encode()
    assert parse_generation_request(ClientApi.CHAT, body, None).stream is (
        value in (True, "true", "True", "1")
    )


@pytest.mark.parametrize("name", ["model", "previous_response_id"])
def test_a_name_of_another_type_is_refused(name: str) -> None:
    for value in (3, True, ["m"], {"m": 1}):
        with pytest.raises(
            InvalidGenerationRequest, match=rf"Expected `str \| null`, got .* - at `\$.{name}`"
        ):
            parse_generation_request(ClientApi.CHAT, json.dumps({name: value}).encode(), None)


def test_a_session_that_is_too_long_names_no_program_and_stays() -> None:
    """vLLM reads the body's session before the header's."""
    body = json.dumps({"session_id": "s" * 100_000, "vllm_xargs": {"session_id": "t" * 100_000}}).encode()
    question = parse_generation_request(ClientApi.CHAT, body, "header")
    assert (question.program_id, question.names_session) == (None, True)
    named, _ = ProgramIdMapper(["a", "b"]).request("a", body, question)
    assert json.loads(named) == json.loads(body)


@pytest.mark.parametrize("hint", ["x" * (7 * MAX_CONTEXT_BYTES), ["p"], {"program_id": "p"}, 3])
def test_a_hint_that_is_too_long_or_no_text_is_removed(hint: Any) -> None:
    body = json.dumps({"vllm_xargs": {"agentic_context": hint, "x": 1}}).encode()
    question = parse_generation_request(ClientApi.CHAT, body, "header")
    assert (question.program_id, question.has_bad_hint) == ("header", True)
    named, _ = ProgramIdMapper(["a", "b"]).request("a", body, question)
    assert json.loads(named) == {"vllm_xargs": {"x": 1}}


def test_the_longest_hint_is_read_however_it_is_written() -> None:
    text = '{"program_id": "p"}'.ljust(MAX_CONTEXT_BYTES)
    written = "".join(f"\\u{ord(char):04x}" for char in text)
    body = b'{"vllm_xargs":{"agentic_context":"%s"}}' % written.encode()
    assert parse_generation_request(ClientApi.CHAT, body, None).program_id == "p"
