"""Routes that any engine can answer, such as tokenizing: the least loaded engine that answers in time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from ...api.api_errors import ApiError
from ...routing.routing_status import ReplicaStatus
from .engine_client import ReplicaRequestError, send_to_engine
from .proxy_headers import client_response_headers, engine_request_headers, without_credentials
from .proxy_request import ProxyContext
from .replica_addresses import ReplicaAddress
from .request_bodies import BodyBudget, BodyRejected

MAX_ANSWER_BYTES = 16 << 20
TIMEOUT_S = 15.0


class AnyEngineRoutes:
    """Routes that are not bound to a replica."""

    def __init__(self, shared: ProxyContext, bodies: BodyBudget) -> None:
        self._shared = shared
        self._bodies = bodies

    async def answer(self, request: Request, tenant: str, *, keeps_key: bool) -> Response:
        """An engine's answer. ``keeps_key``: pass the client's key on. Raises ``ApiError``."""
        held = self._bodies.begin(tenant, MAX_ANSWER_BYTES)
        try:
            body = await held.read(request.headers.get("content-length"), request.receive)
            if body is None:
                raise ApiError(400, "the client disconnected before its body arrived", "send it again")
            return await self._ask(request, body, keeps_key)
        except BodyRejected as refused:
            self._shared.metrics.refused(refused.code)
            after = {"Retry-After": str(round(refused.retry_after_s))} if refused.retry_after_s else {}
            next_step = "try again soon" if after else "send it again, shorter or faster"
            raise ApiError(refused.status, str(refused), next_step, after) from None
        finally:
            held.free()

    async def _ask(self, request: Request, body: bytes, keeps_key: bool) -> Response:
        headers = request.scope["headers"] if keeps_key else without_credentials(request.scope["headers"])
        passed = engine_request_headers(headers, key=self._shared.engine_key, rank=None, session=None)
        for address in await self._by_load():
            asking = send_to_engine(self._shared.session(), address, "POST", request.url.path, passed, body)
            try:
                answer = await asyncio.wait_for(asking, TIMEOUT_S)
            except (ReplicaRequestError, asyncio.TimeoutError):
                continue
            answer.response.close()
            response = Response(answer.first, answer.response.status)
            response.raw_headers.extend(
                pair
                for pair in client_response_headers(answer.response.raw_headers, address.replica_id)
                if pair[0] != b"content-length"
            )
            return response
        raise ApiError(503, "no engine answers", "try again soon", {"Retry-After": "2"})

    async def _by_load(self) -> list[ReplicaAddress]:
        states = {state.replica: state for state in await self._shared.routing_backend.replicas()}
        well = [one for one in self._shared.replicas.engines() if _is_healthy(states.get(one.replica_id))]
        return sorted(well, key=lambda one: states[one.replica_id].load)


def _is_healthy(state: ReplicaStatus | None) -> bool:
    return state is not None and state.health != "suspect"
