"""One connection to a peer, as the loop sees it: a line of what is to be said, bounded in bytes, and a watch
on whether the peer takes any of it.

Payloads are memory of others, of which the link lets little be under way to one peer at a time; what is
counted is what messages themselves take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .peer_transport import ByteStream
from .transfer_actions import SendMessage
from .transfer_wire import encode

MAX_QUEUED_BYTES = 64 << 20
"""Of messages that wait for one peer, as of a thousand long contexts offered at once. With more it is cut
off."""
PIECE_BYTES = 256 << 10
"""What a peer is to take within ``patience_s``; of larger messages each piece has as long."""
_STALL_CHECKS = 4
"""Times that the watch looks within that. Where this process stood still, the first look comes late, and
whatever the socket has done meanwhile is seen before the next."""


class _QueuedMessage(NamedTuple):
    frame: bytes
    payload: Sequence[memoryview]
    item: int | None


class PeerConnection:
    """What is to be said on a stream. Only in its loop."""

    def __init__(
        self,
        stream: ByteStream,
        patience_s: float,
        sent: Callable[[int], None],
        stalled: Callable[[], None],
    ) -> None:
        """``sent`` is told of each item that is out, or never will be: nothing reads its memory any more.
        ``stalled`` is told that the peer has taken nothing for ``patience_s``: it is to close the stream."""
        self.stream = stream
        self.tasks: list[asyncio.Task[None]] = []
        self.waiting_bytes = 0
        """Of messages that are not out."""
        self._patience_s = patience_s
        self._sent = sent
        self._stalled = stalled
        self._timer: asyncio.TimerHandle
        self._line: asyncio.Queue[_QueuedMessage | None] = asyncio.Queue()
        """``None``: nothing more comes."""

    def say(self, action: SendMessage) -> bool:
        """Put something into the line. False: too much waits in it already, and this does not.

        Raises ``PeerWireError`` for a message that is too long.
        """
        frame = encode(action.message, sum(part.nbytes for part in action.payload))
        if self.waiting_bytes + len(frame) > MAX_QUEUED_BYTES:
            return False
        self.waiting_bytes += len(frame)
        self._line.put_nowait(_QueuedMessage(frame, action.payload, action.item))
        return True

    def finish(self) -> None:
        """``talk`` returns once what was to be said before is out."""
        self._line.put_nowait(None)

    async def talk(self) -> None:
        """Say what is to be said, until ``finish``. Raises what the stream does."""
        while (said := await self._line.get()) is not None:
            try:
                for piece in _pieces([said.frame, *said.payload]):
                    await self._write(piece)
            except BaseException:
                self.stream.close()  # before anybody hears that its memory is free
                raise
            finally:
                self.waiting_bytes -= len(said.frame)
                if said.item is not None:
                    self._sent(said.item)

    def unsaid(self) -> list[int]:
        """Empty the line, of a connection that is over; returns the items that were in it."""
        items = []
        while not self._line.empty():
            said = self._line.get_nowait()
            if said is not None:
                self.waiting_bytes -= len(said.frame)
                if said.item is not None:
                    items.append(said.item)
        return items

    async def _write(self, piece: Sequence[memoryview]) -> None:
        self._look(_STALL_CHECKS)
        try:
            await self.stream.write(piece)
        finally:
            self._timer.cancel()

    def _look(self, left: int) -> None:
        if not left:
            self._stalled()
            return
        later = asyncio.get_running_loop().call_later
        self._timer = later(self._patience_s / _STALL_CHECKS, self._look, left - 1)


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes, so many at a time."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest.nbytes:
            taken, rest = rest[:room], rest[room:]
            piece.append(taken)
            room -= taken.nbytes
            if not room:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece
