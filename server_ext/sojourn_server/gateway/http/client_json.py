"""Reads values and fields of a client's JSON, at a cost that does not grow with hostile content.

A body of 64 MiB may have tens of millions of values. As Python objects they would take 25 times the body's
memory. Decoding them is one call that holds Python's global lock, so all other requests would stop. So the
gateway builds objects only of short values, and dictionaries only of objects with few fields.
"""

from __future__ import annotations

from abc import ABC
from typing import Any, Final

import msgspec
from sojourn.errors import InputError
from sojourn.wire_codec import MAX_CONTEXT_BYTES

MAX_VALUE_BYTES = 4096
"""Maximum JSON length in bytes of a flag, count or name that is decoded. A program id has at most 256 bytes,
and at most 1,538 as JSON."""
MAX_HINT_JSON_BYTES = 6 * MAX_CONTEXT_BYTES + 2
"""Maximum JSON length in bytes of a hint that is decoded. JSON may write one byte of text as six bytes."""
NOT_SCALAR: Final = ()
"""Stands for an array or an object in the result of ``short_value``."""
LONG_VALUE: Final = "?" * (MAX_CONTEXT_BYTES + 1)
"""Stands for a value that is too long, in the result of ``short_value``. It is treated like the value
itself: it is too long for a program id or a hint, and is neither a flag nor a count."""

MAX_FIELD_NAMES = 16_384
"""Maximum number of field names of a JSON object that the gateway has to change. Names within its values do
not count. A dictionary of this size takes a few MiB and milliseconds. Honest requests have fewer than 100
names."""
_MIN_FIELD_BYTES = 5
"""Bytes of the shortest field with its comma: ``"":0,``."""


class InvalidGenerationRequest(InputError):
    """The body is not a valid request of its API. The text says what was wrong and what was expected."""


class _TooManyNamesError(Exception):
    """An object has more than ``MAX_FIELD_NAMES`` field names. Not a ``ValueError``, because msgspec would
    turn that into an error of its own."""


class _Name(ABC):  # noqa: B024  (an ABC, so that ``str`` can be registered)
    """The type of a field name: any ``str``. msgspec does not know this type, so it passes each name to
    ``dec_hook``."""


_Name.register(str)
_COUNTED_MEMBERS: Any = dict[_Name, msgspec.Raw]
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


def short_value(raw: msgspec.Raw, most_bytes: int = MAX_VALUE_BYTES) -> str | int | float | tuple[()] | None:
    """Decode a JSON value of at most ``most_bytes``. Raises ``msgspec.DecodeError``.

    Any array or object becomes ``NOT_SCALAR``. A text or number that is too long becomes ``LONG_VALUE``. A
    missing field (no bytes) becomes ``None``.
    """
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

    ``parse_generation_request`` skips unknown fields, so a field may be invalid even in a body that it
    accepted.
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
    """Return the fields of a JSON object by name, as raw JSON. Names are counted as they are decoded, so at
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
