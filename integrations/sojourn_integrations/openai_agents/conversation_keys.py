"""Keys of conversations: which session objects of the OpenAI Agents SDK stand for the same conversation.

A session id such as ``"1"`` is unique in one store only. So a key identifies the store too:

- file: its path;
- database server: its address, with the tables, prefix or collections;
- database in memory: its engine;
- store with an unknown address: the client object that the session uses;
- session class that is not the framework's: the session's attributes. Texts, whole numbers and paths count
  with their values at the first run, objects by identity. Flags, fractions, times and locks do not count.

Two clients or other objects are two stores only while both are alive. An application may make a session
object, and so a client, for each request. A new client then continues the conversation of a client that is
gone. If nothing identifies the store, the key is class and id, and two conversations may share a program.
That costs less than a new program, without its KV, for each run.

A wrapper such as ``EncryptedSession`` has the store of the session inside. A session in memory or without an
id is its own key.
"""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from .stores_by_objects import SeenObject, StoresByObjects, seen

MAX_WRAPPERS = 8
"""Maximum number of wrappers around a session that are looked into. A wrapper may contain itself."""

_FRAMEWORK = "agents."
"""Start of the names of the framework's modules."""
_NOT_OF_STORE = frozenset({"session_id", "_session_id", "session_settings"})
"""Attributes of a session that say nothing about its store."""
_LOCKS_AND_TIMES = frozenset({"_thread", "asyncio.locks", "threading", "datetime"})
"""Modules of locks and times. Each session object has its own, whatever its store."""


class ConversationKey(NamedTuple):
    """The key of a conversation in the ``ProgramCache``, and what follows from it."""

    key: Hashable
    program_id: str | None
    """Program id, the same in every process of this machine. ``None`` for a conversation that is not in a
    file; its program gets a random id."""
    ends: bool
    """True if the conversation ends once its session object is garbage-collected. That is so for a
    conversation that is in memory or has no id yet, since no other session object could continue it."""
    by_object: bool
    """True if ``key`` stands for the session object, since the conversation is in memory or has no id yet."""


def conversation_key(conversation: Any) -> ConversationKey:
    """Return the key of the conversation that the session object ``conversation`` stands for."""
    names, inner = [_session_id(conversation)], conversation
    while (wrapped := getattr(inner, "underlying_session", None)) is not None and len(names) <= MAX_WRAPPERS:
        inner = wrapped
        names.append(_session_id(inner))
    path = str(getattr(inner, "db_path", ""))
    if None in names or path == ":memory:":
        return ConversationKey(object_key(conversation), None, True, True)
    kind, where = type(inner), tuple(map(str, names))
    if not path:
        store = _store(inner)
        key = kind, store.values, where
        return ConversationKey((*key, _stores_by_objects.find(key, store.objects)), None, False, False)
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
    """Values of live objects, which need not be hashable. A value is dropped with its object."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ReferenceType[Any], Any]] = {}

    def find(self, owner: object, make: Callable[[], Any]) -> Any:
        """Return the value of ``owner``. At the first call this is the result of ``make()``, which is then
        kept. Raises ``TypeError`` for an object that is not weakly referable."""
        key = id(owner)
        known = self._known.get(key)
        if known is None or known[0]() is not owner:
            self._known.pop(key, None)
            new = ref(owner, lambda _: self._known.pop(key, None)), make()
            known = self._known.setdefault(key, new)  # another thread may be first
        return known[1]


_tokens = _ValuesByObject()
_attributes = _ValuesByObject()
_stores_by_objects = StoresByObjects()


def _token(owner: object) -> Hashable:
    """Return a value that stands for this object only, as long as it lives. Raises ``TypeError`` for an
    object that is not weakly referable."""
    found: Hashable = _tokens.find(owner, object)
    return found


class _Store(NamedTuple):
    """What identifies the store of a session that has no file."""

    values: Hashable
    objects: Mapping[str, SeenObject] = {}
    """Objects of the session by the names of their attributes."""


def _store(inner: Any) -> _Store:
    """Return what identifies the store of a session that has no file; empty if nothing does."""
    with suppress(Exception):  # another release of the framework may lack an attribute
        for kind in type(inner).__mro__:
            if kind.__module__.startswith(_FRAMEWORK) and kind.__name__ in _STORES:
                return _STORES[kind.__name__](inner)
    with suppress(Exception):  # TypeError, or anything that the attributes of a foreign object raise
        found: _Store = _attributes.find(inner, lambda: _attribute_store(inner))
        return found
    return _Store(())


def _attribute_store(inner: Any) -> _Store:
    """Return the session's attributes as a store. Texts, whole numbers and paths count by value, other
    objects by identity. The session's id, flags, fractions, times and locks say nothing about a store. The
    values of containers do not count, since they may be the conversation itself."""
    values, objects = [], {}
    for name, value in sorted(vars(inner).items()):
        if value is None or isinstance(value, (bool, float)) or name in _NOT_OF_STORE:
            continue
        if type(value).__module__ in _LOCKS_AND_TIMES:
            continue
        if _is_plain(value):
            values.append((name, str(value)))
        else:
            objects[name] = seen(value, inner)
    return _Store(tuple(values), objects)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (str, bytes, int, os.PathLike, uuid.UUID, Enum))


def _sqlalchemy_store(inner: Any) -> _Store:
    engine, tables = inner._engine, (inner._sessions.fullname, inner._messages.fullname)
    url, options = engine.url, engine.sync_engine.get_execution_options()
    database = str(url.database or "")
    if url.get_backend_name() == "sqlite" and (
        not database or ":memory:" in database or "mode=memory" in str(url)
    ):
        return _Store((_token(engine.sync_engine), tables))
    if not (url.host or database):  # a function makes the connections
        return _Store(tables, {"engine": seen(engine.sync_engine, inner)})
    # Options may choose another schema.
    return _Store((url.render_as_string(hide_password=True), repr(sorted(options.items())), tables))


def _redis_store(inner: Any) -> _Store:
    pool = getattr(inner._redis, "connection_pool", None)
    given = getattr(pool, "connection_kwargs", {})
    address = tuple(str(given.get(name, "")) for name in ("host", "port", "path", "db", "username"))
    if given.get("host") or given.get("path"):
        return _Store((address, inner._key_prefix))
    return _Store(inner._key_prefix, {"client": seen(inner._redis, inner)})


def _mongodb_store(inner: Any) -> _Store:
    seeds = getattr(inner._client, "_seeds", None)
    if seeds:
        return _Store((frozenset(seeds), inner._init_sub_key))
    return _Store(inner._init_sub_key, {"client": seen(inner._client, inner)})


def _dapr_store(inner: Any) -> _Store:
    return _Store(inner._state_store_name, {"client": seen(inner._dapr_client, inner)})


def _openai_store(inner: Any) -> _Store:
    client = inner._openai_client
    url = getattr(client, "base_url", None)
    return _Store((), {"client": seen(client, inner)}) if url is None else _Store(str(url))


_STORES: dict[str, Callable[[Any], _Store]] = {
    "SQLAlchemySession": _sqlalchemy_store,
    "RedisSession": _redis_store,
    "MongoDBSession": _mongodb_store,
    "DaprSession": _dapr_store,
    "OpenAIConversationsSession": _openai_store,
}
"""Functions that read the store of a session, by the name of the framework's class."""
