"""A route class that checks the key before it reads anything, and words every error as a ``Failure``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from .calls import EngineStock, EngineUnavailable
from .failure import RETRY_AFTER_S, Failure
from .keys import ApiKeys

logger = logging.getLogger(__name__)


def guarded(keys: ApiKeys) -> type[APIRoute]:
    """A route class that checks the key before it reads anything, and words every error as a ``Failure``."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_guarded(request: Request) -> Response:
                if not keys.allow(request.headers.get("authorization")):
                    return _unauthorised().response()
                try:
                    return await handle(request)
                except HTTPException:
                    raise
                except Exception as error:
                    return _explain(error).response()

            return handle_guarded

    return GuardedRoute


def _explain(error: Exception) -> Failure:
    if isinstance(error, Failure):
        return error
    if isinstance(error, RequestValidationError):
        # Where and what, but not the rejected input, which FastAPI's own answer repeats.
        problems = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
        return Failure(400, problems, "correct the query parameters; they are described under /docs")
    if isinstance(error, EngineUnavailable):
        logger.warning("engine unavailable: %s", error)
        return Failure(
            503,
            "the engine did not answer",
            "try again; requests work without events, only less KV is kept",
            {"Retry-After": str(RETRY_AFTER_S)},
        )
    if isinstance(error, EngineStock):
        return Failure(
            501,
            "this server runs vLLM's own scheduler, so there is no program state to show or to tell",
            "start it with `sojourn serve MODEL --policy continuum`; "
            "until then clients need send no events, and lose nothing by sending them",
        )
    logger.error("route failed", exc_info=error)
    return Failure(500, "the server failed to answer", "see the server's log, and report it as a bug")


def _unauthorised() -> Failure:
    return Failure(
        401,
        "missing or wrong API key",
        "send `Authorization: Bearer KEY` with a key the server was started with",
        {"WWW-Authenticate": "Bearer"},
    )
