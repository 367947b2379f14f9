"""Stores of sessions that no address identifies, told apart by the objects that their sessions use.

Two objects are two stores only while both are alive. An application may make a session object, and so a
client, for each request. A new client then continues the store of a client that is gone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from sojourn.process_hooks import register_at_fork

from .program_cache import MAX_CACHED_PROGRAMS

MAX_STORES_OF_A_CONVERSATION = 64
"""Maximum number of stores that are told apart for one conversation id. Each run compares its session with
all of them. Beyond the limit the oldest store is forgotten; its next session object starts a new program."""


class SeenObject(NamedTuple):
    """An object that a session uses."""

    id: int
    lives: ReferenceType[Any]
    """The object. For an object that is not weakly referable, the session that uses it."""


def seen(owner: object, session: object) -> SeenObject:
    """Return ``owner``, an object that ``session`` uses, as a ``SeenObject``. Raises ``TypeError`` if neither
    is weakly referable."""
    try:
        return SeenObject(id(owner), ref(owner))
    except TypeError:  # a list, a dict, a connection of sqlite3
        return SeenObject(id(owner), ref(session))


class _KnownStore:
    """A store of a conversation, with the objects that its sessions use. It is part of the conversation's
    key."""

    __slots__ = ("objects",)

    def __init__(self, objects: Mapping[str, SeenObject]) -> None:
        self.objects = dict(objects)

    def count_shared(self, objects: Mapping[str, SeenObject]) -> int:
        """Return how many of ``objects`` this store has. Returns -1 if ``objects`` belong to another store:
        in the place of one of them, this store has a different object that is alive."""
        shared = 0
        for name, new in objects.items():
            known = self.objects.get(name)
            if known is None:
                continue
            if known.id == new.id:
                shared += 1
            elif known.lives() is not None:
                return -1
        return shared

    def add(self, objects: Mapping[str, SeenObject]) -> None:
        """Add each of ``objects`` whose place is free. A place is free if its object is gone or if it never
        had one."""
        for name, new in objects.items():
            if name not in self.objects or self.objects[name].lives() is None:
                self.objects[name] = new


class StoresByObjects:
    """Stores by conversation and objects. Keeps no object alive. Safe to use in threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, list[_KnownStore]] = OrderedDict()
        self._lock = threading.RLock()
        register_at_fork(after_in_child=self._after_fork)

    def find(self, conversation: Hashable, objects: Mapping[str, SeenObject]) -> Hashable:
        """Return a value that stands for the store of ``conversation``. ``objects`` are the objects that the
        session uses, by attribute name. Stores are told apart only by attributes that both sessions have."""
        with self._lock:
            stores = self._known.setdefault(conversation, [])
            self._known.move_to_end(conversation)
            while len(self._known) > MAX_CACHED_PROGRAMS:  # the cache has no program of the first one either
                self._known.popitem(last=False)
            best, most = None, -1
            for store in stores:
                if (shared := store.count_shared(objects)) > most:
                    best, most = store, shared
            if best is None:
                best = _KnownStore(objects)
                stores.append(best)
                del stores[:-MAX_STORES_OF_A_CONVERSATION]
            else:
                best.add(objects)
            return best

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # a thread that the child lacks may hold the other
