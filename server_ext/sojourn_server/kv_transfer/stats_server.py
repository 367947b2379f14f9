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
from collections.abc import Callable
from typing import Any

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
