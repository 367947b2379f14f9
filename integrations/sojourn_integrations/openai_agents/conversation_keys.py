"""Keys of conversations: which session objects of the OpenAI Agents SDK stand for the same conversation.

A session id such as ``"1"`` is unique in one store only. A file is identified by its path and tables. Of
other stores, such as a database server, the key is the session's class and id, so conversations of two such
stores may share a program. That costs less than a new program, without its KV, for each session object, since
an application may make a session object for each request.

A wrapper such as ``EncryptedSession`` has the store of the session inside. A session in memory or without an
id is its own key.
"""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Hashable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

MAX_WRAPPERS = 8
"""Maximum number of wrappers around a session that are looked into. A wrapper may contain itself."""


class ConversationKey(NamedTuple):
    """The key of a conversation in the ``ProgramCache``, and what follows from it."""

    key: Hashable
    program_id: str | None
    """Program id, the same in every process of this machine. ``None`` for a conversation that is not in a
    file; its program gets a random id."""
    by_object: bool
    """True if ``key`` stands for the session object, since the conversation is in memory or has no id yet. It
    ends once the object is garbage-collected, since no other session object could continue it."""


def conversation_key(conversation: Any) -> ConversationKey:
    """Return the key of the conversation that the session object ``conversation`` stands for."""
    names, inner = [_session_id(conversation)], conversation
    while (wrapped := getattr(inner, "underlying_session", None)) is not None and len(names) <= MAX_WRAPPERS:
        inner = wrapped
        names.append(_session_id(inner))
    path = str(getattr(inner, "db_path", ""))
    if None in names or path == ":memory:":
        return ConversationKey(object_key(conversation), None, True)
    kind, where = type(inner), tuple(map(str, names))
    if not path:
        return ConversationKey((kind, where), None, False)
    path = os.path.abspath(path)
    tables = tuple(str(getattr(inner, name, "")) for name in ("sessions_table", "messages_table"))
    # Neither path nor name is sent. The same path on another machine is another conversation.
    digest = sha256(machine_id() + "\n".join((path, *tables, *where)).encode(errors="replace")).hexdigest()
    return ConversationKey((kind, path, tables, where), f"agents-{digest[:32]}", False)


def object_key(conversation: Any) -> Hashable:
    """Return the key that stands for the session object itself."""
    # Another object may get the same id() later. The finalizer of ``add_holder`` frees the key before that.
    return type(conversation), id(conversation)


def _session_id(conversation: Any) -> Any:
    try:
        return conversation.session_id
    except Exception:  # some sessions get their id from a server at the first use
        return getattr(conversation, "_session_id", None)  # version 0.6 has no public name for it


@functools.cache
def machine_id() -> bytes:
    """Return an id of this machine or container. The id stays the same until the machine restarts. A network
    address is not enough, since containers on different machines may have the same address."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # Linux; elsewhere host name and address must suffice
    try:
        booted = boot.read_bytes()
    except OSError:
        booted = b""
    return sha256(f"{uuid.getnode()}\n{socket.gethostname()}\n".encode(errors="replace") + booted).digest()
