"""Keys of conversations: which session objects of the OpenAI Agents SDK stand for the same conversation.

A session id such as ``"1"`` is unique in one store only. So a key identifies the store too: a file by its
path, a database server by its address, with the tables or prefix, and a database in memory by its engine. If
nothing identifies the store, as with a session class of the user, the key is class and id, and conversations
of two such stores may share a program. That costs less than a new program, without its KV, for each session
object, since an application may make a session object for each request.

A wrapper such as ``EncryptedSession`` has the store of the session inside. A session in memory or without an
id is its own key.
"""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Callable, Hashable
from contextlib import suppress
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
        return ConversationKey((kind, _store(inner), where), None, False)
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


# ---- stores


def _store(inner: Any) -> Hashable:
    """Return what identifies the store of a session that has no file; ``None`` if nothing does."""
    with suppress(Exception):  # another release of the framework may lack an attribute
        for kind in type(inner).__mro__:
            if kind.__module__.startswith("agents.") and kind.__name__ in _STORES:
                return _STORES[kind.__name__](inner)
    return None


def _sqlalchemy_store(inner: Any) -> Hashable:
    engine, tables = inner._engine, (inner._sessions.fullname, inner._messages.fullname)
    url, options = engine.url, engine.sync_engine.get_execution_options()
    database = str(url.database or "")
    in_memory = not database or ":memory:" in database or "mode=memory" in str(url)
    if url.get_backend_name() == "sqlite" and in_memory:
        return id(engine.sync_engine), tables
    # Options may choose another schema.
    return url.render_as_string(hide_password=True), repr(sorted(options.items())), tables


def _redis_store(inner: Any) -> Hashable:
    given = inner._redis.connection_pool.connection_kwargs
    address = tuple(str(given.get(name, "")) for name in ("host", "port", "path", "db", "username"))
    return address, inner._key_prefix


_STORES: dict[str, Callable[[Any], Hashable]] = {
    "SQLAlchemySession": _sqlalchemy_store,
    "RedisSession": _redis_store,
    "MongoDBSession": lambda inner: (frozenset(inner._client._seeds), inner._init_sub_key),
    "DaprSession": lambda inner: inner._state_store_name,
    "OpenAIConversationsSession": lambda inner: str(inner._openai_client.base_url),
}
"""Functions that read the store of a session, by the name of the framework's class."""
