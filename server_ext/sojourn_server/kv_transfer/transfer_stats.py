"""Statistics of an engine's KV transfers: times of steps, status of the manager, and a local stats server.

The engine asks a worker once for the address of its ``StatsServer``, and then reads the worker's statistics
from that server. It does not call the worker each time: vLLM's worker processes spin for a second after a
call, so a call every second would keep a core busy.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .transfer_manager import TransferManager

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TransferStepTimes:
    """Seconds spent on transfers, in one step or summed over many."""

    waited_s: float = 0.0
    """Seconds that the forward pass waited for a layer to arrive."""
    copied_s: float = 0.0
    """Seconds that the forward pass waited while arrived layers were copied into blocks."""
    streamed_s: float = 0.0
    """Seconds between the arrival of a load's first and last layer, summed over loads. Blocks read from local
    storage arrive whole and add nothing."""
    gathered_s: float = 0.0
    """Seconds for which layers were copied out of blocks for pushes, in parallel with the forward pass."""
    push_waited_s: float = 0.0
    """Seconds that steps waited at their end for the copies counted in ``gathered_s``."""

    def add(self, other: TransferStepTimes) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))


ANSWER_TIMEOUT_S = 1.0
"""Maximum seconds that the server or its client waits for the other side."""
_MAX_ANSWER_BYTES = 1 << 20


class StatsUnavailable(OSError):
    """Raised if the server does not answer, or if its answer is not a JSON object."""


class StatsServer:
    """A thread that answers each connection with a JSON document and closes the connection. Its socket is in
    a temporary folder that only this process's user can access. ``close`` removes socket and folder."""

    def __init__(
        self, document: Callable[[], dict[str, Any] | None], *, answer_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        """Open the socket and start the thread. For each connection, the thread sends the result of
        ``document``, within ``answer_s`` seconds. Raises ``OSError`` if no socket can be opened."""
        self._document = document
        self._answer_s = answer_s
        self._folder = tempfile.mkdtemp(prefix="sojourn-paths-")
        self.address = os.path.join(self._folder, "stats")
        """Path of the Unix socket; the address for ``fetch_stats``."""
        self._over = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(self.address)
            self._socket.listen()
        except OSError:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._thread = threading.Thread(target=self._serve, name="sojourn-paths-stats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and remove the socket."""
        self._over = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join(2 * self._answer_s)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while not self._over:
            try:
                asker, _ = self._socket.accept()
            except OSError:
                return
            with asker:
                try:
                    asker.settimeout(self._answer_s)
                    asker.sendall(json.dumps(self._document()).encode())
                except OSError:
                    pass  # the client has gone
                except Exception:
                    logger.exception("sojourn: the status of KV transfers could not be sent")


def fetch_stats(address: str) -> dict[str, Any] | None:
    """Return the document of the ``StatsServer`` at ``address``; ``None`` if the server has no document now.
    Raises ``StatsUnavailable``."""
    answer = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(ANSWER_TIMEOUT_S)
            asking.connect(address)
            while part := asking.recv(1 << 16):
                answer += part
                if len(answer) > _MAX_ANSWER_BYTES:
                    raise StatsUnavailable(
                        f"{address}: more than {_MAX_ANSWER_BYTES} bytes; expected a short document"
                    )
    except OSError as error:
        raise StatsUnavailable(f"{address}: {error}") from error
    return read_stats(bytes(answer), address)


def read_stats(answer: bytes, address: str) -> dict[str, Any] | None:
    """Return the document in the server's ``answer``; ``None`` if the server has no document now.
    ``address``: the server's address, for error messages. Raises ``StatsUnavailable``."""
    try:
        document = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise StatsUnavailable(f"{address}: not JSON: {error}") from error
    if document is not None and not isinstance(document, dict):
        raise StatsUnavailable(f"{address}: {type(document).__name__}; expected an object")
    return document


def transfer_manager_stats(manager: TransferManager, counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the status of a worker's transfers: ``TransferManager.stats`` with more fields.

    ``addresses`` and ``epoch`` are the manager's, for peers. ``kv`` is a digest that is equal for workers
    that can exchange KV. The argument ``counts`` has the worker's counters. They are merged into the field
    ``counts``.
    """
    stats = manager.stats()
    return {
        **stats,
        "addresses": list(manager.addresses),
        "epoch": manager.epoch,
        "kv": manager.node.identity.digest().hex(),
        "counts": dict(sorted((Counter(stats["counts"]) + Counter(counts)).items())),
    }
