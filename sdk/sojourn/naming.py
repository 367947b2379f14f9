"""Strings made fit for the wire: ids keep their identity, names are cut."""

from __future__ import annotations

import os

from .ids import MAX_ID_BYTES, CallId, ProgramId
from .wire import MAX_EVENT_NAME_BYTES


def new_program_id() -> ProgramId:
    """A fresh id with 96 random bits."""
    return ProgramId("p-" + os.urandom(12).hex())


def new_call_id() -> CallId:
    """A fresh id for a tool call that came without one."""
    return CallId("t-" + os.urandom(6).hex())


def call_id_of(text: object) -> CallId:
    """Any id as the wire accepts it. One too long becomes its hash, so that start and stop still agree."""
    value = _sayable(text)
    if not value:
        return new_call_id()
    if len(value) > MAX_ID_BYTES // 4 and len(value.encode()) > MAX_ID_BYTES:
        from hashlib import sha256

        return CallId("h-" + sha256(value.encode()).hexdigest())
    return CallId(value)


def name_of(text: object, empty: str = "unnamed") -> str:
    """A tool's, agent's or node's name, cut to ``MAX_EVENT_NAME_BYTES`` of UTF-8."""
    value = _sayable(text) or empty
    if len(value) <= MAX_EVENT_NAME_BYTES // 4:
        return value
    return value.encode()[:MAX_EVENT_NAME_BYTES].decode("utf-8", "ignore")


def _sayable(text: object) -> str:
    value = text if isinstance(text, str) else str(text)
    # Lone surrogates are legal in Python and in nothing we send.
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
