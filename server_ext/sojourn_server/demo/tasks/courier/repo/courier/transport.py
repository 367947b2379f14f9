"""Where messages go. Tests use the flaky one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class TransportError(Exception):
    """The message did not arrive; trying again may help."""


class Refused(Exception):
    """The receiver does not want the message; trying again is useless."""


class Transport(Protocol):
    """Anything that can carry a message."""

    def send(self, recipient: str, body: str) -> None:
        """Deliver or raise ``TransportError`` or ``Refused``."""


@dataclass
class FlakyTransport:
    """Fails ``failures`` times for each recipient, then delivers."""

    failures: int = 0
    refused: frozenset[str] = frozenset()
    delivered: list[tuple[str, str]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)

    def send(self, recipient: str, body: str) -> None:
        """Deliver after enough failures."""
        if recipient in self.refused:
            raise Refused(recipient)
        self.calls[recipient] = self.calls.get(recipient, 0) + 1
        if self.calls[recipient] <= self.failures:
            raise TransportError(f"{recipient}: attempt {self.calls[recipient]} lost")
        self.delivered.append((recipient, body))
