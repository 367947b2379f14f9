"""A program's move to another replica: its state goes with it, its KV if that is cheaper than computing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from urllib.parse import quote

import aiohttp
import msgspec

from ..core import facts
from .books import Books
from .news import Key, ProgramNews
from .replicas import Replicas
from .watch import Description

LEAST_WAIT_S, MOST_WAIT_S = 0.5, 5.0
"""For KV to be written out: a few of the old engine's steps are always waited for, and whoever waits longer
than the latter has it computed."""
LEAVES_AFTER_S = 30.0
"""An old engine is told so late that a program has left, where no request of it goes on."""
LOOK_AGAIN_S = 0.02
COMPUTED_TOKENS_PER_S = 5_000.0
"""What an engine is taken to compute: waiting longer for KV than computing it takes does not pay."""
_TIMEOUT = aiohttp.ClientTimeout(total=MOST_WAIT_S)


class _Stored(msgspec.Struct):
    """What a replica answers of a program's KV that is being written out."""

    context_tokens: int = 0
    stored_tokens: int = 0
    pending_tokens: int = 0


_decoder = msgspec.json.Decoder(_Stored)


class Mover:
    """Carries out moves. None fails: what cannot be taken along is computed anew."""

    def __init__(
        self,
        news: ProgramNews,
        replicas: Replicas,
        describes: Callable[[str], Description | None],
        session: Callable[[], aiohttp.ClientSession],
        books: Books,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._news = news
        self._replicas = replicas
        self._describes = describes
        self._session = session
        self._books = books
        self._clock = clock
        self._leaving: dict[Key, facts.Left] = {}
        """Moves that an old replica has not been told of."""

    async def moved(
        self, key: Key, moved_from: str, moved_to: str, reason: str, authorization: str | None
    ) -> None:
        """A program's next request is about to go to another replica than its last. Returns when it may.

        ``authorization``: what to show to the old one.
        """
        try:
            await self._move(key, moved_from, moved_to, reason, authorization)
        finally:
            self._leave(key)

    async def _move(
        self, key: Key, moved_from: str, moved_to: str, reason: str, authorization: str | None
    ) -> None:
        self._news.moved(key, moved_to)
        began_s = self._clock()
        stored = False
        old, new = self._describes(moved_from), self._describes(moved_to)
        if old is not None and new is not None and old.shares_disk and new.shares_disk:
            stored = await self._written_out(key, moved_from, authorization)
        waited_s = self._clock() - began_s
        kv = "shared" if stored else "recomputed"
        self._books.moved(key[0], key[1], moved_from, moved_to, reason, kv, waited_s)

    def left(self, left: facts.Left) -> None:
        """Nobody will ask a replica for a program's KV again, once what goes along is written out."""
        key = (left.tenant, left.program_id)
        self._leave(key)
        self._leaving[key] = left
        asyncio.get_running_loop().call_later(LEAVES_AFTER_S, self._leave, key, left)

    def _leave(self, key: Key, left: facts.Left | None = None) -> None:
        waiting = self._leaving.get(key)
        if waiting is not None and left in (None, waiting):
            del self._leaving[key]
            self._news.left(waiting)

    async def _written_out(self, key: Key, moved_from: str, authorization: str | None) -> bool:
        """Whether most of a program's KV is on the shared disk, after waiting as long as that can pay."""
        address = self._replicas.get(moved_from)
        if address is None:
            return False
        url = f"{address.url}/sojourn/v1/programs/{quote(key[1], safe='')}/persist"
        began_s = self._clock()
        while True:
            stored = await self._ask(url, authorization)
            if stored is None or not stored.context_tokens:
                return False
            if not stored.pending_tokens:
                return stored.stored_tokens * 2 >= stored.context_tokens
            worth_s = stored.context_tokens / COMPUTED_TOKENS_PER_S
            worth_s = min(MOST_WAIT_S, max(LEAST_WAIT_S, worth_s))
            if self._clock() - began_s >= worth_s:
                return False
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _ask(self, url: str, authorization: str | None) -> _Stored | None:
        headers = {"Authorization": authorization} if authorization is not None else {}
        try:
            async with self._session().post(url, headers=headers, timeout=_TIMEOUT) as answer:
                body = await answer.read()
                return _decoder.decode(body) if answer.status == 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, msgspec.DecodeError):
            return None
