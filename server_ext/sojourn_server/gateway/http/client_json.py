"""Reads values and members of a client's JSON, at a cost that does not grow with hostile content.

A body of 64 MiB may have tens of millions of values. As Python objects they would take 25 times the body's
memory, and their decoding, one call that holds Python's global lock, would stop all other requests. So the
gateway builds objects only of short values, and a dictionary only of an object with few members.
"""

from __future__ import annotations

from abc import ABC
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
"""Maximum number of field names of a JSON object, if the gateway has to change the object. Names within its
values do not count. A dictionary of so many names takes a few MiB and milliseconds. Requests have fewer than
100."""
_MIN_FIELD_BYTES = 5
"""Length of the shortest field with its comma: ``"":0,``."""


class InvalidGenerationRequest(InputError):
    """The body is not a request of its API. The text says what was wrong and what was expected."""


class _TooManyNamesError(Exception):
    """An object has more than ``MAX_FIELD_NAMES`` field names. It is no ``ValueError``, because msgspec turns
    those into its own errors."""


class _Name(ABC):  # noqa: B024  (an ABC, so that ``str`` can be registered)
    """The type of a field name: any ``str``. msgspec passes each value of a type that it does not know to
    ``dec_hook``."""


_Name.register(str)
_COUNTED_MEMBERS: Any = dict[_Name, msgspec.Raw]
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
    is not valid JSON, or if there are more than ``MAX_FIELD_NAMES`` names. A repeated name counts each time.

    Even a body that ``parse_generation_request`` accepted may have an invalid field, because that function
    skips unknown fields.
    """
    may_have_too_many = memoryview(body).nbytes > MAX_FIELD_NAMES * _MIN_FIELD_BYTES
    try:
        return _counted_members(body) if may_have_too_many else _members.decode(body)
    except _TooManyNamesError:
        raise InvalidGenerationRequest(
            f"the body has an object with more than {MAX_FIELD_NAMES} field names; expected at most as many"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidGenerationRequest(
            f"the body has an object whose members cannot be read: {error}"
        ) from None


def _counted_members(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object by name, as raw JSON. Each name is counted when it is decoded, so at
    most ``MAX_FIELD_NAMES`` are kept. Raises ``_TooManyNamesError`` or ``msgspec.DecodeError``."""
    count = 0

    def count_name(_type: type, name: str) -> str:
        nonlocal count
        count += 1
        if count > MAX_FIELD_NAMES:
            raise _TooManyNamesError
        return name

    members: dict[str, msgspec.Raw] = msgspec.json.decode(body, type=_COUNTED_MEMBERS, dec_hook=count_name)
    return members


def encode_raw(value: Any) -> msgspec.Raw:
    """Encode ``value`` as raw JSON, to be put into a larger document."""
    return msgspec.Raw(msgspec.json.encode(value))
