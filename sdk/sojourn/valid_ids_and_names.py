"""Ids and names that the wire accepts: makes fresh ids, hashes long ids and cuts long names."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator

from .ids import CallId, ProgramId, id_problem
from .process_hooks import register_at_fork
from .wire_codec import MAX_EVENT_NAME_BYTES


def new_program_id() -> ProgramId:
    """Return a fresh id with 96 random bits."""
    return ProgramId("p-" + os.urandom(12).hex())


def new_call_id() -> CallId:
    """Return a fresh id for a tool call that has none."""
    return CallId("t-" + os.urandom(6).hex())


def _request_ids() -> Iterator[str]:
    return map(f"r-{os.urandom(8).hex()}-%d".__mod__, itertools.count())


request_ids: Iterator[str] = _request_ids()
"""Fresh ids for logical requests: ``next(valid_ids_and_names.request_ids)``. Each has 64 random bits and a
number. The bits are drawn once per process, since drawing them costs more than all other work for a request.
"""


def _after_fork() -> None:
    global request_ids
    request_ids = _request_ids()


register_at_fork(after_in_child=_after_fork)

SHORT = 64
"""Number of characters up to which an ASCII text is accepted without measuring its bytes."""


def call_id_of(text: object) -> CallId:
    """Return ``text`` as a tool call's id. A text that the wire does not accept is hashed, so that the call's
    start and stop events still match. An empty text gives a fresh id."""
    if type(text) is str and 0 < len(text) <= SHORT and text.isascii() and text.isprintable():
        return CallId(text)
    value = _encodable(text)
    if not value:
        return new_call_id()
    if id_problem(value) is not None:
        from hashlib import sha256

        return CallId("h-" + sha256(value.encode()).hexdigest())
    return CallId(value)


def name_of(text: object, empty: str = "unnamed") -> str:
    """Return ``text`` as the name of a tool, agent or node, cut to ``MAX_EVENT_NAME_BYTES`` of UTF-8. If
    ``text`` is empty, returns the argument ``empty``."""
    if type(text) is str and 0 < len(text) <= SHORT and text.isascii():
        return text
    value = _encodable(text) or empty
    if len(value) <= MAX_EVENT_NAME_BYTES // 4:
        return value
    return value.encode()[:MAX_EVENT_NAME_BYTES].decode("utf-8", "ignore")


def process_name() -> str | None:
    """Return the name of the script or module that this process runs; ``None`` if it has none."""
    path = sys.argv[0] if sys.argv else ""
    folder, name = os.path.split(path)
    if name in ("__main__.py", "__init__.py"):
        name = os.path.basename(folder)
    return name_of(name) if name and not name.startswith("-") else None


def agent_type_of(name: object, default: object) -> str:
    """Return ``name`` as the name and type of an outermost agent. ``default`` is the name that the
    framework gives to unnamed agents. For an unnamed agent, returns the script's name instead, if the
    script has one."""
    return (process_name() if name == default else None) or name_of(name)


def _encodable(text: object) -> str:
    value = text if isinstance(text, str) else str(text)
    # Lone surrogates are legal in Python but not in UTF-8.
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
