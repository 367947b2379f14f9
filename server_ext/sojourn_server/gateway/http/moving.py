"""A program's move to another replica: its state goes with it, its KV if that is cheaper than computing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp
import msgspec

from ..core import facts
from .books import Books
from .known import Key
from .news import ProgramNews
from .replicas import Replicas
from .riding import Riding
from .watch import Description

LEAST_WAIT_S, MOST_WAIT_S = 0.5, 5.0
"""For KV to be written out: a few of the old engine's steps are always waited for, and whoever waits longer
than the latter has it computed."""
LEAVES_AFTER_S = 30.0
"""An old engine is told so late that a program has left, where no request of it goes on."""
MOST_TIMES = 4
"""So many times that long it is waited for a program whose new home is gone."""
LOOK_AGAIN_S = 0.02
COMPUTED_TOKENS_PER_S = 5_000.0
"""What an engine is taken to compute: waiting longer for KV than computing it takes does not pay."""
_TIMEOUT = aiohttp.ClientTimeout(total=MOST_WAIT_S)


class _Stored(msgspec.Struct):
    """What a replica answers of a program's KV that is being written out."""

    context_tokens: int = 0
    stored_tokens: int = 0
    pending_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Leaving:
    """A replica that has not been told that a program has left."""

    left: facts.Left
    timer: asyncio.TimerHandle | None = None
    times: int = 0
    """The timer ran out."""


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
        self._leaving: dict[Key, list[_Leaving]] = {}
        """Moves that old replicas have not been told of, oldest first."""
        self._waiting: Counter[Key] = Counter()
        """Requests that wait here for a replica."""
        news.describes = describes

    @contextlib.contextmanager
    def waits(self, key: Key) -> Iterator[None]:
        """A request of a program waits for its replica: until it goes there, what is elsewhere is kept."""
        self._waiting[key] += 1
        try:
            yield
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]

    async def goes(
        self,
        key: Key,
        replica_id: str,
        moved_from: str | None,
        reason: str,
        authorization: str | None,
        riding: Riding | None = None,
        *,
        left_because: str = "",
    ) -> None:
        """A program's next request is about to go to a replica. Returns when it may.

        ``moved_from``: where the program was until now, if elsewhere. ``authorization``: what to show there.
        ``riding``: what the request itself tells. ``left_because``: why it could not stay where it was.
        """
        self._stay(key, replica_id)
        # It may have moved twice before any request went: its KV is where it was first.
        leaving = self._leaving.get(key)
        moved_from = leaving[0].left.replica_id if leaving else moved_from
        try:
            telling = self._news.before(key, replica_id, riding)
            if moved_from is None or moved_from == replica_id:
                await telling
            else:
                moving = self._move(key, moved_from, replica_id, reason, authorization, left_because)
                await asyncio.gather(telling, moving)
        finally:
            self._leave(key, authorization)

    async def _move(
        self,
        key: Key,
        moved_from: str,
        moved_to: str,
        reason: str,
        authorization: str | None,
        left_because: str,
    ) -> None:
        began_s = self._clock()
        stored = False
        old, new = self._describes(moved_from), self._describes(moved_to)
        if old is not None and new is not None and old.shares_disk and new.shares_disk:
            stored = await self._written_out(key, moved_from, authorization)
        waited_s = self._clock() - began_s
        kv = "shared" if stored else "recomputed"
        self._books.moved(key[0], key[1], moved_from, moved_to, reason, kv, waited_s, left_because)

    def left(self, left: facts.Left) -> None:
        """Nobody will ask a replica for a program's KV again, once what goes along is written out."""
        key = (left.tenant, left.program_id)
        self._stay(key, left.replica_id)
        one = _Leaving(left)
        self._leaving.setdefault(key, []).append(one)
        self._wait_on(key, one)

    def _wait_on(self, key: Key, one: _Leaving) -> None:
        one.timer = asyncio.get_running_loop().call_later(LEAVES_AFTER_S, self._late, key, one)

    def _late(self, key: Key, one: _Leaving) -> None:
        """No request of the program has gone on."""
        one.times += 1
        # A program without a home may have lost it to a replica's death, and come back to where its KV is.
        is_homeless = self._news.home(*key) is None and one.times < MOST_TIMES
        if key in self._waiting or is_homeless:
            self._wait_on(key, one)
        else:
            self._say(key, one, None)

    def _leave(self, key: Key, authorization: str | None) -> None:
        for one in list(self._leaving.get(key, ())):
            self._say(key, one, authorization)

    def _say(self, key: Key, one: _Leaving, authorization: str | None) -> None:
        self._drop(key, one)
        home_id = self._news.home(*key)
        if home_id == one.left.replica_id:
            return
        old, home = self._replicas.get(one.left.replica_id), self._replicas.get(home_id)
        if old is not None and home is not None and old.url == home.url:
            return  # an engine's ranks hear everything that one of them is told
        self._news.left(one.left, authorization)

    def _stay(self, key: Key, replica_id: str) -> None:
        """A program is where it seemed to have left."""
        for one in list(self._leaving.get(key, ())):
            if one.left.replica_id == replica_id:
                self._drop(key, one)

    def _drop(self, key: Key, one: _Leaving) -> None:
        if one.timer is not None:
            one.timer.cancel()
        every = self._leaving.get(key, [])
        if one in every:
            every.remove(one)
        if not every:
            self._leaving.pop(key, None)

    async def _written_out(self, key: Key, moved_from: str, authorization: str | None) -> bool:
        """Whether most of a program's KV is on the shared disk, after waiting as long as that can pay."""
        address = self._replicas.get(moved_from)
        if address is None:
            return False
        url = f"{address.url}/sojourn/v1/programs/{quote(self._news.names.of(*key), safe='')}/persist"
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
