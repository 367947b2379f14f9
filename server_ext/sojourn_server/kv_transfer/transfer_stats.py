"""Answers another process of this machine how the traffic goes, without waking whoever computes.

An engine's worker may be asked by the engine itself, as it is told what to compute. But vLLM's workers look
for more to do for a whole second after each such call, without a pause; asked once a second, a worker with
nothing to do keeps a core busy. So it is asked once in that way, and from then on here.
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
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .peer_table import identity_digest

if TYPE_CHECKING:
    from .transfer_manager import TransferManager
from dataclasses import dataclass, fields


@dataclass(slots=True)
class TransferStepTimes:
    """Seconds, of one step or summed over many."""

    waited_s: float = 0.0
    """Computing stood still until a layer of what is loaded had come."""
    copied_s: float = 0.0
    """It stood still while layers that had come were copied into blocks."""
    streamed_s: float = 0.0
    """Over which layers came in, from a load's first layer to its last, summed over loads. What is read from
    storage here comes in whole blocks, all layers at once, and adds nothing."""
    gathered_s: float = 0.0
    """Over which layers were copied out of blocks to be pushed, beside the computing."""
    push_waited_s: float = 0.0
    """Steps stood still at their end until that was done."""

    def add(self, other: TransferStepTimes) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def __bool__(self) -> bool:
        return bool(
            self.waited_s or self.copied_s or self.streamed_s or self.gathered_s or self.push_waited_s
        )


logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 1.0
"""Most that an answer may take, for who asks and who is asked."""
_MAX_ANSWER_BYTES = 1 << 20


class StatsUnavailable(OSError):
    """Nobody answers there, or not with what was asked for."""


class StatsServer:
    """A thread that answers each connection with a JSON document, and ends it.

    Its socket lies in a folder that is its user's alone, and goes with it.
    """

    def __init__(
        self, told: Callable[[], dict[str, Any] | None], *, answer_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        """``told`` is called on the thread; ``None``: there is nothing to tell. Raises ``OSError`` where no
        socket can be had."""
        self._told = told
        self._answer_s = answer_s
        self._folder = tempfile.mkdtemp(prefix="sojourn-paths-")
        self.address = os.path.join(self._folder, "told")
        """Whom to ``fetch_stats``."""
        self._over = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(self.address)
            self._socket.listen()
        except OSError:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._thread = threading.Thread(target=self._serve, name="sojourn-paths-teller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._over = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # what waits in accept() comes back
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
                    asker.sendall(json.dumps(self._told()).encode())
                except OSError:
                    pass  # it did not wait
                except Exception:
                    logger.exception("sojourn: what was asked of the paths could not be told")


def fetch_stats(address: str) -> dict[str, Any] | None:
    """What a teller tells. Raises ``StatsUnavailable``."""
    told = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(ANSWER_TIMEOUT_S)
            asking.connect(address)
            while part := asking.recv(1 << 16):
                told += part
                if len(told) > _MAX_ANSWER_BYTES:
                    raise StatsUnavailable(
                        f"{address}: more than {_MAX_ANSWER_BYTES} bytes; expected a short document"
                    )
        document = json.loads(told)
    except (OSError, ValueError) as error:
        raise StatsUnavailable(f"{address}: {error}") from error
    if document is not None and not isinstance(document, dict):
        raise StatsUnavailable(f"{address}: {type(document).__name__}; expected an object")
    return document


UNKNOWN_BLOCK_S = 0.0
"""What a Full Block takes where that is not known: a link that was given no rate has a speed once it has
moved something."""


def transfer_manager_stats(traffic: TransferManager, counts: Mapping[str, int]) -> dict[str, Any]:
    """How an engine's traffic goes; ``counts`` are its worker's, beside the manager's own.

    ``addresses`` and ``epoch`` are what peers need; ``links`` by name, each with ``queued_bytes``,
    ``queued_s`` and ``moved_bytes``; ``received_bytes`` came from peers; ``block_s`` is what the link from
    storage takes for a Full Block. ``queued_s`` is ``None`` where there is a queue and no speed is known: 0
    would say that nothing waits. ``kv`` is equal for engines that take each other's KV.
    """
    told: dict[str, Any] = traffic.do(lambda now: _numbers(traffic, now))
    told["counts"] = dict(sorted({**told["counts"], **counts}.items()))
    return told


def _numbers(traffic: TransferManager, now: float) -> dict[str, Any]:
    transfer_context = traffic.core.transfer_context
    stats = traffic.core.stats(now)
    return {
        **stats,
        "addresses": list(traffic.addresses),
        "epoch": traffic.epoch,
        "kv": identity_digest(transfer_context.identity),
        "received_bytes": transfer_context.counts["bytes_fetched"] + transfer_context.counts["bytes_taken"],
        "block_s": transfer_context.reads.seconds_for(transfer_context.memory.block_bytes) or UNKNOWN_BLOCK_S,
    }
