"""Keys of conversations: which session objects of the OpenAI Agents SDK stand for the same conversation.

A session id such as ``"1"`` is unique in one store only. So a key has the store too:

- a file by its path;
- a database server by its address, with the tables, prefix or collections in it;
- a store in memory, or one whose address is unknown, by the client object that the session uses;
- the store of a session class that is not the framework's by the values of the session's attributes, as they
  were at its first run, and by the objects among them.

A wrapper such as ``EncryptedSession`` has the store of the session inside. If nothing identifies the store,
the session object itself is the key.
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
from weakref import ReferenceType, ref

MAX_WRAPPERS = 8
"""Maximum number of wrappers around a session that are looked into. A wrapper may contain itself."""

_FRAMEWORK = "agents."
"""Start of the names of the framework's modules."""
_NOT_OF_STORE = frozenset({"session_id", "_session_id", "session_settings"})
"""Attributes of a session that say nothing about its store."""
_LOCKS = frozenset({"_thread", "asyncio.locks", "threading"})
"""Modules of locks. Each session object has its own, whatever its store."""


class ConversationKey(NamedTuple):
    """The key of a conversation in the ``ProgramCache``, and what follows from it."""

    key: Hashable
    program_id: str | None
    """Program id, the same in every process of this machine. ``None`` for a conversation that is not in a
    file; its program gets a random id."""
    ends: bool
    """True for a conversation that is in memory or has no id yet, since no other session object could
    continue it. It ends once its session object is garbage-collected."""
    by_object: bool
    """True if ``key`` stands for the session object, since the conversation is in memory or has no id yet, or
    since nothing identifies its store."""


def conversation_key(conversation: Any) -> ConversationKey:
    """Return the key of the conversation that the session object ``conversation`` stands for."""
    names, inner = [_session_id(conversation)], conversation
    while (wrapped := getattr(inner, "underlying_session", None)) is not None and len(names) <= MAX_WRAPPERS:
        inner = wrapped
        names.append(_session_id(inner))
    by_object = ConversationKey(object_key(conversation), None, True, True)
    path = str(getattr(inner, "db_path", ""))
    if None in names or path == ":memory:":
        return by_object
    kind, where = type(inner), tuple(map(str, names))
    if not path:
        store = _store(inner)
        return by_object if store is None else ConversationKey((kind, store, where), None, False, False)
    path = os.path.abspath(path)
    tables = tuple(str(getattr(inner, name, "")) for name in ("sessions_table", "messages_table"))
    # Neither path nor name is sent. The same path on another machine is another conversation.
    digest = sha256(machine_id() + "\n".join((path, *tables, *where)).encode(errors="replace")).hexdigest()
    return ConversationKey((kind, path, tables, where), f"agents-{digest[:32]}", False, False)


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


class _ValuesByObject:
    """Values of live objects, which need not be hashable. A value goes with its object."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ReferenceType[Any], Any]] = {}

    def find(self, owner: object, make: Callable[[], Any]) -> Any:
        """Return the value of ``owner``; at the first call, ``make()``. Raises ``TypeError`` for an object
        that is not weakly referable."""
        key = id(owner)
        known = self._known.get(key)
        if known is None or known[0]() is not owner:
            self._known.pop(key, None)
            new = ref(owner, lambda _: self._known.pop(key, None)), make()
            known = self._known.setdefault(key, new)  # another thread may be first
        return known[1]


_tokens = _ValuesByObject()
_attributes = _ValuesByObject()


def _token(owner: object) -> Hashable:
    """Return a value that stands for this object only, as long as it lives. Raises ``TypeError`` for an
    object that is not weakly referable."""
    found: Hashable = _tokens.find(owner, object)
    return found


def _store(inner: Any) -> Hashable | None:
    """Return what identifies the store of a session that has no file; ``None`` if nothing does."""
    with suppress(Exception):  # TypeError, or anything that the attributes of a foreign object raise
        for kind in type(inner).__mro__:
            if kind.__module__.startswith(_FRAMEWORK) and kind.__name__ in _STORES:
                return _STORES[kind.__name__](inner)
        found: Hashable = _attributes.find(inner, lambda: _attribute_values(inner))
        return found
    return None


def _attribute_values(inner: Any) -> Hashable:
    """Return the session's attributes without its id: texts, numbers and paths by value, other objects by
    identity. Raises ``TypeError`` if an attribute is not weakly referable, such as a list."""
    values: list[Hashable] = []
    for name, value in sorted(vars(inner).items()):
        if name in _NOT_OF_STORE or type(value).__module__ in _LOCKS:
            continue
        plain = value is None or isinstance(value, (str, bytes, int, float, os.PathLike))
        values.append((name, str(value) if plain else _token(value)))
    return tuple(values)


def _sqlalchemy_store(inner: Any) -> Hashable:
    engine, tables = inner._engine, (inner._sessions.fullname, inner._messages.fullname)
    url, options = engine.url, engine.sync_engine.get_execution_options()
    database = str(url.database or "")
    in_memory = url.get_backend_name() == "sqlite" and (
        not database or ":memory:" in database or "mode=memory" in str(url)
    )
    if in_memory or not (url.host or database):  # without either, a function makes the connections
        return _token(engine.sync_engine), tables
    # Options may choose another schema.
    return url.render_as_string(hide_password=True), repr(sorted(options.items())), tables


def _redis_store(inner: Any) -> Hashable:
    pool = getattr(inner._redis, "connection_pool", None)
    given = getattr(pool, "connection_kwargs", {})
    address = tuple(str(given.get(name, "")) for name in ("host", "port", "path", "db", "username"))
    known = given.get("host") or given.get("path")
    return address if known else _token(inner._redis), inner._key_prefix


def _mongodb_store(inner: Any) -> Hashable:
    seeds = getattr(inner._client, "_seeds", None)
    return frozenset(seeds) if seeds else _token(inner._client), inner._init_sub_key


def _dapr_store(inner: Any) -> Hashable:
    return _token(inner._dapr_client), inner._state_store_name


def _openai_store(inner: Any) -> Hashable:
    client = inner._openai_client
    url = getattr(client, "base_url", None)
    return _token(client) if url is None else str(url)


_STORES: dict[str, Callable[[Any], Hashable]] = {
    "SQLAlchemySession": _sqlalchemy_store,
    "RedisSession": _redis_store,
    "MongoDBSession": _mongodb_store,
    "DaprSession": _dapr_store,
    "OpenAIConversationsSession": _openai_store,
}
"""Functions that read the store of a session, by the name of the framework's class."""
