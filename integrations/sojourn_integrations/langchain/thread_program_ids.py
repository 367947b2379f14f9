"""Program ids of LangGraph threads, and of the conversations that OpenTelemetry spans name.

A ``thread_id`` such as ``"1"`` is unique in one checkpointer only, while a program id must be unique on a
server that many clients share. So the id is a hash of the graph's name, the thread id and a random secret per
checkpointer object. Two users of thread ``"1"`` never share a program. A restarted client has new ids, so its
programs' KV is no longer protected, but answers stay correct.

If ``SOJOURN_PROGRAM_ID`` is set, its value replaces the secret. Then a restarted client gets the same ids
again, and several workers on one database get equal ids. The value must be unique.

A conversation is handled like a thread without a checkpointer, with a secret per process.
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from sojourn.process_hooks import register_at_fork
from sojourn.runtime import session

_secrets: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()
_of_process = os.urandom(16)


def thread_program_id(graph: str, saver: object | None, thread: str, ns: str) -> str:
    """Return the program id of a thread. The same arguments give the same id in one process.

    ``graph`` is the graph's name, ``thread`` its ``thread_id``. ``saver`` is the checkpointer; ``None`` if
    only callbacks report the run, so that the checkpointer is unknown. ``ns`` is the checkpoint namespace if
    the graph runs inside another graph of the thread, else empty.
    """
    config = session().config
    named = config.program_id if config is not None else None
    parts = (_bytes(named) if named else _secret(saver), _bytes(graph), _bytes(thread), _bytes(ns))
    digest = sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts))
    return "p-" + digest.hexdigest()[:24]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _secret(saver: object | None) -> bytes:
    """Return the random secret that makes the program ids of this checkpointer's threads unique. ``None`` and
    all checkpointers that are not weakly referable share one secret."""
    try:
        # Another thread may be first, so its secret counts.
        return _secrets.get(saver) or _secrets.setdefault(saver, os.urandom(16))
    except TypeError:  # not weakly referable
        return _of_process


def _renew() -> None:
    """Make new secrets in a forked process."""
    global _of_process
    _secrets.clear()
    _of_process = os.urandom(16)


register_at_fork(after_in_child=_renew)
