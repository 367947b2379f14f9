"""Strings made fit for the wire: ids keep their identity, names are cut."""

from __future__ import annotations

import itertools
import os

from .ids import MAX_ID_BYTES, CallId, ProgramId
from .wire import MAX_EVENT_NAME_BYTES


def new_program_id() -> ProgramId:
    """A fresh id with 96 random bits."""
    return ProgramId("p-" + os.urandom(12).hex())


def new_call_id() -> CallId:
    """A fresh id for a tool call that came without one."""
    return CallId("t-" + os.urandom(6).hex())


_requests = itertools.count()
_requests_of = os.urandom(8).hex()


def new_request_id() -> str:
    """A fresh id for a logical request: 64 random bits of this process, and a number. Asking the system for
    random bits each time would take longer than all else that is in it."""
    return f"r-{_requests_of}-{next(_requests):x}"


def _after_fork() -> None:
    global _requests_of
    _requests_of = os.urandom(8).hex()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

_SHORT = 64
"""Characters of a name or an id that is in bounds however it is encoded."""


def call_id_of(text: object) -> CallId:
    """Any id as the wire accepts it. One too long becomes its hash, so that start and stop still agree."""
    if type(text) is str and 0 < len(text) <= _SHORT and text.isascii():
        return CallId(text)
    value = _sayable(text)
    if not value:
        return new_call_id()
    if len(value) > MAX_ID_BYTES // 4 and len(value.encode()) > MAX_ID_BYTES:
        from hashlib import sha256

        return CallId("h-" + sha256(value.encode()).hexdigest())
    return CallId(value)


def name_of(text: object, empty: str = "unnamed") -> str:
    """A tool's, agent's or node's name, cut to ``MAX_EVENT_NAME_BYTES`` of UTF-8."""
    if type(text) is str and 0 < len(text) <= _SHORT and text.isascii():
        return text
    value = _sayable(text) or empty
    if len(value) <= MAX_EVENT_NAME_BYTES // 4:
        return value
    return value.encode()[:MAX_EVENT_NAME_BYTES].decode("utf-8", "ignore")


def _sayable(text: object) -> str:
    value = text if isinstance(text, str) else str(text)
    # Lone surrogates are legal in Python and in nothing we send.
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
