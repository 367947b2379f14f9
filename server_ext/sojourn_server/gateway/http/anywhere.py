"""What any engine can answer: tokenizing and the like. The least loaded one that answers in time does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp
from starlette.requests import Request
from starlette.responses import Response

from ...web.failure import Failure
from .bodies import Bodies, BodyRefused
from .books import Books
from .decider import Decider, ReplicaStatus
from .engines import ReplicaLost, ask_engine
from .headers import back, onwards, without_key
from .replicas import Address, Replicas

MOST_BYTES = 16 << 20
TIMEOUT_S = 15.0


class Anywhere:
    """The routes that go to whichever engine."""

    def __init__(
        self,
        decider: Decider,
        replicas: Replicas,
        session: Callable[[], aiohttp.ClientSession],
        bodies: Bodies,
        books: Books,
        *,
        engine_key: str | None = None,
    ) -> None:
        self._decider = decider
        self._replicas = replicas
        self._session = session
        self._bodies = bodies
        self._books = books
        self._engine_key = engine_key

    async def answer(self, request: Request, tenant: str, *, keeps_key: bool) -> Response:
        """An engine's answer. ``keeps_key``: the client's may go on to engines. Raises ``Failure``."""
        held = self._bodies.begin(tenant, MOST_BYTES)
        try:
            body = await held.read(request.headers.get("content-length"), request.receive)
            if body is None:
                raise Failure(400, "the client went away before its body arrived", "send it again")
            return await self._ask(request, body, keeps_key)
        except BodyRefused as refused:
            self._books.refused(refused.code)
            after = {"Retry-After": str(round(refused.retry_after_s))} if refused.retry_after_s else {}
            next_step = "try again soon" if after else "send it again, shorter or faster"
            raise Failure(refused.status, str(refused), next_step, after) from None
        finally:
            held.free()

    async def _ask(self, request: Request, body: bytes, keeps_key: bool) -> Response:
        headers = request.scope["headers"] if keeps_key else without_key(request.scope["headers"])
        passed = onwards(headers, key=self._engine_key, rank=None, session=None)
        for address in await self._by_load():
            asking = ask_engine(self._session(), address, "POST", request.url.path, passed, body)
            try:
                answer = await asyncio.wait_for(asking, TIMEOUT_S)
            except (ReplicaLost, asyncio.TimeoutError):
                continue
            answer.response.close()
            response = Response(answer.first, answer.response.status)
            response.raw_headers.extend(
                pair
                for pair in back(answer.response.raw_headers, address.replica_id)
                if pair[0] != b"content-length"
            )
            return response
        raise Failure(503, "no engine answers", "try again soon", {"Retry-After": "2"})

    async def _by_load(self) -> list[Address]:
        states = {state.replica: state for state in await self._decider.replicas()}
        well = [one for one in self._replicas.engines() if _is_well(states.get(one.replica_id))]
        return sorted(well, key=lambda one: states[one.replica_id].load)


def _is_well(state: ReplicaStatus | None) -> bool:
    return state is not None and state.health != "suspect"
