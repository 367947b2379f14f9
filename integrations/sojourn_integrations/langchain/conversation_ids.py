"""Which program id belongs to a thread of LangGraph's.

A ``thread_id`` such as ``"1"`` is unique in one checkpointer only, while a program id must be unique on a
server that many clients share. So the id is a hash of the graph's name, the thread id and a secret that each
checkpointer object gets at random: two users of thread ``"1"`` never meet, and a client that restarts has new
ids, which costs its KV's protection but never its correctness. Where ``SOJOURN_PROGRAM_ID`` is set it takes
the place of the secret: then a restarted client, or several workers on one database, find the same programs
again, and whoever sets it answers for its being unique.
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from sojourn.runtime import session

_secrets: WeakKeyDictionary[Any, tuple[int, bytes]] = WeakKeyDictionary()
_of_process = (os.getpid(), os.urandom(16))


def thread_program_id(graph: str, saver: object | None, thread: str, ns: str) -> str:
    """Always the same for the same four; ``ns`` is where a graph runs inside another one of that thread.
    ``saver`` is the checkpointer, ``None`` where only callbacks tell of the run."""
    config = session().config
    named = config.program_id if config is not None else None
    parts = (_bytes(named) if named else _secret(saver), _bytes(graph), _bytes(thread), _bytes(ns))
    digest = sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts))
    return "p-" + digest.hexdigest()[:24]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _secret(saver: object | None) -> bytes:
    """Of one checkpointer in one process: a forked copy of it has threads of its own."""
    global _of_process
    pid = os.getpid()
    try:
        known = _secrets.get(saver)
        if known is not None and known[0] != pid:
            _secrets.pop(saver, None)
            known = None
        if known is None:
            known = _secrets.setdefault(
                saver, (pid, os.urandom(16))
            )  # another thread's, where it was quicker
    except TypeError:  # it takes no weak reference
        if _of_process[0] != pid:
            _of_process = (pid, os.urandom(16))
        known = _of_process
    return known[1]
