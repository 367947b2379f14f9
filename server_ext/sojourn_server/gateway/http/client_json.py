"""Reads values and members of a client's JSON, at a cost that does not grow with hostile content.

A body of 64 MiB may have tens of millions of values. As Python objects they would take 25 times the body's
memory, and their decoding, one call that holds Python's global lock, would stop all other requests. So the
gateway builds objects only of short values, and a dictionary only of an object with few members.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from sojourn.errors import InputError
from sojourn.wire_codec import MAX_CONTEXT_BYTES

MAX_VALUE_BYTES = 4096
"""Maximum length, as JSON, of a flag, count or name that is decoded. A program id has at most 256 bytes, as
JSON at most 1,538."""
MAX_HINT_JSON_BYTES = 6 * MAX_CONTEXT_BYTES + 2
"""Maximum length, as JSON, of a hint that is decoded. JSON may write each byte of a text as six."""
NOT_SCALAR: Final = ()
"""Stands for an array or an object in the result of ``short_value``."""
LONG_VALUE: Final = "?" * (MAX_CONTEXT_BYTES + 1)
"""Stands for a longer value in the result of ``short_value``. It is too long for a program id and for a hint,
and is neither a flag nor a count, just as the value itself."""

MAX_FIELD_NAMES = 16_384
"""Maximum number of field names in a JSON object outside its ``LongFields``, if the gateway has to change the
object. A dictionary of so many members takes a few MiB and milliseconds. Requests have fewer than 100."""
SLICE_BYTES = 1 << 20
"""Size of the slices in which a body is searched. A search holds Python's global lock, so the search of a
whole body would block the event loop."""
_MIN_FIELD_BYTES = 5
"""Length of the shortest field with its comma: ``"":0,``."""


class InvalidGenerationRequest(InputError):
    """The body is not a request of its API. The text says what was wrong and what was expected."""


class LongFields(msgspec.Struct):
    """Fields of requests, and of ``vllm_xargs``, whose values may have any number of field names or
    colons."""

    messages: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    suffix: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    previous_input_messages: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    documents: msgspec.Raw = msgspec.Raw(b"")
    logit_bias: msgspec.Raw = msgspec.Raw(b"")
    response_format: msgspec.Raw = msgspec.Raw(b"")
    structured_outputs: msgspec.Raw = msgspec.Raw(b"")
    chat_template: msgspec.Raw = msgspec.Raw(b"")
    chat_template_kwargs: msgspec.Raw = msgspec.Raw(b"")
    mm_processor_kwargs: msgspec.Raw = msgspec.Raw(b"")
    metadata: msgspec.Raw = msgspec.Raw(b"")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    vllm_xargs: msgspec.Raw = msgspec.Raw(b"")
    agentic_context: msgspec.Raw = msgspec.Raw(b"")


_long_fields = msgspec.json.Decoder(LongFields)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def short_value(raw: msgspec.Raw, most_bytes: int = MAX_VALUE_BYTES) -> str | int | float | tuple[()] | None:
    """Decode a JSON value of at most ``most_bytes``. A longer text or number becomes ``LONG_VALUE``, any
    array or object ``NOT_SCALAR``, and a missing field (no bytes) ``None``. Raises
    ``msgspec.DecodeError``."""
    text = bytes(memoryview(raw)[: most_bytes + 1])
    if not text:
        return None
    if text[:1] in b"[{":
        return NOT_SCALAR
    if len(text) > most_bytes:
        return LONG_VALUE
    value: str | int | float | None = msgspec.json.decode(text)
    return value


def members_of(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object by name, as raw JSON. Raises ``InvalidGenerationRequest`` if a field
    is not valid JSON, or if there are more than ``MAX_FIELD_NAMES`` names outside ``LongFields``.

    Even a body that ``parse_generation_request`` accepted may have an invalid field, because that function
    skips unknown fields.
    """
    try:
        _check_field_names(body)
        return _members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGenerationRequest(
            f"the body has an object whose members cannot be read: {error}"
        ) from None


def _check_field_names(body: bytes | msgspec.Raw) -> None:
    """Check that a JSON object has at most ``MAX_FIELD_NAMES`` field names outside its ``LongFields``.

    Colons are counted, since that needs no objects. Colons in texts and in nested objects count too, so the
    object has no more members. Raises ``InvalidGenerationRequest`` or ``msgspec.DecodeError``."""
    found = _long_fields.decode(body)
    parts = [memoryview(getattr(found, name)) for name in LongFields.__struct_fields__]
    outside_bytes = memoryview(body).nbytes - sum(part.nbytes for part in parts)
    if outside_bytes <= MAX_FIELD_NAMES * _MIN_FIELD_BYTES:
        return
    names = _count_colons(memoryview(body)) - sum(_count_colons(part) for part in parts)
    if names > MAX_FIELD_NAMES:
        raise InvalidGenerationRequest(
            f"the body has {names} colons outside of messages, prompt, input, tools and other long fields; "
            f"expected at most {MAX_FIELD_NAMES}, one for each field name"
        )


def _count_colons(part: memoryview) -> int:
    return sum(
        bytes(part[start : start + SLICE_BYTES]).count(b":") for start in range(0, part.nbytes, SLICE_BYTES)
    )


def encode_raw(value: Any) -> msgspec.Raw:
    """Encode ``value`` as raw JSON, to be put into a larger document."""
    return msgspec.Raw(msgspec.json.encode(value))
