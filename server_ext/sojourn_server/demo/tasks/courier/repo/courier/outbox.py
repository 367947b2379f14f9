"""The outbox: sends what it is given, keeps what could not be sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .backoff import Backoff
from .transport import Refused, Transport, TransportError


@dataclass(frozen=True)
class Receipt:
    """What became of one message."""

    recipient: str
    delivered: bool
    attempts: int
    waited_s: float


class Outbox:
    """Sends messages one after the other and retries those that get lost."""

    def __init__(
        self,
        transport: Transport,
        backoff: Backoff | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport = transport
        self._backoff = backoff or Backoff()
        self._sleep = sleep
        self.dead_letters: list[tuple[str, str, str]] = []

    def send(self, recipient: str, body: str) -> Receipt:
        """Deliver ``body``; after the last failed attempt it becomes a dead letter."""
        delays = self._backoff.delays()
        attempts, waited_s = 0, 0.0
        while True:
            attempts += 1
            try:
                self._transport.send(recipient, body)
            except Refused as error:
                return self._give_up(recipient, body, error, attempts, waited_s)
            except TransportError as error:
                delay_s = next(delays, None)
                if delay_s is None:
                    return self._give_up(recipient, body, error, attempts, waited_s)
                self._sleep(delay_s)
                waited_s += delay_s
            else:
                return Receipt(recipient, True, attempts, waited_s)

    def _give_up(
        self, recipient: str, body: str, error: Exception, attempts: int, waited_s: float
    ) -> Receipt:
        self.dead_letters.append((recipient, body, str(error)))
        return Receipt(recipient, False, attempts, waited_s)
