"""Our routes in vLLM's API server, and why a request was refused: a ``vllm.endpoint_plugins`` entry point.

Loaded only where ``VLLM_PLUGINS`` names ``sojourn``. The engine's side of the call
is ``EngineCore.sojourn_call``, which our ``vllm.general_plugins`` entry point adds.
"""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from vllm import envs
from vllm.v1.engine.exceptions import EngineDeadError

from sojourn_server.web.calls import EngineError, EngineStock, EngineUnavailable, is_stock
from sojourn_server.web.keys import ApiKeys
from sojourn_server.web.prometheus import bridge_for, poll_forever
from sojourn_server.web.refused import TellRefused
from sojourn_server.web.routes import build_router

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

UTILITY = "sojourn_call"
"""The method of the engine core that answers all our calls: ``(op, payload) -> str``."""

_NO_METHOD = re.compile(r"has no attribute '_?sojourn")
_SHUTTING_DOWN = "shutting down"


class SojournEndpoint:
    """vLLM's endpoint plugin protocol (``vllm/plugins/endpoint_plugins/interface.py``)."""

    name = "sojourn"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine = VllmEngine()
        self._keys = ApiKeys()
        self._poller: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, which let nobody in until ``init_state``, and what tells of refusals."""
        app.include_router(build_router(self._engine, self._keys))
        # vLLM adds its own after this, so they lie around ours and have seen to the key before.
        app.add_middleware(TellRefused, engine=self._engine, request_id=_request_id)

    async def init_state(self, engine_client: EngineClient | None, state: Any, args: Namespace) -> None:
        """Connect the routes to the engine, take over the server's keys and start the metrics."""
        # The same precedence as vLLM's own check: the environment counts where no key was passed.
        self._keys.configure(key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key)
        if engine_client is None:
            return
        self._engine.connect(engine_client)
        # The task refers to the engine weakly and ends with it; cancelled with the event loop otherwise.
        self._poller = asyncio.create_task(
            poll_forever(weakref.ref(self._engine), bridge_for()), name="sojourn-metrics"
        )


def _request_id(scope: Mapping[str, Any]) -> str | None:
    """What vLLM's route calls the request; the engine's own ids are made of it."""
    return getattr(scope["state"].get("request_metadata"), "request_id", None)


class VllmEngine:
    """``EngineCalls`` over vLLM's engine client, which it does not keep alive."""

    def __init__(self) -> None:
        self._client: weakref.ref[Any] | None = None
        self._stock: str | None = None

    def connect(self, engine_client: EngineClient) -> None:
        """Direct calls to ``engine_client``."""
        self._client = weakref.ref(engine_client)

    def engine_ids(self) -> Sequence[str]:
        """Ranks of the engines this server talks to, as in vLLM's metrics."""
        # Each engine's address on the bus is its rank, two bytes, least first.
        addresses = getattr(self._core(), "core_engines", None)
        if not addresses:
            return ["0"]
        return [str(int.from_bytes(address, "little")) for address in addresses]

    async def call(self, op: str, payload: str) -> list[str]:
        """See ``EngineCalls``."""
        if self._stock is not None:
            # Asking again would only write another traceback into the engine's log.
            raise EngineStock(self._stock)
        answers = await self._call(op, payload)
        for answer in answers:
            if not isinstance(answer, str):
                raise EngineError(f"{op}: the engine answered {type(answer).__name__}, expected JSON text")
            if is_stock(answer):
                why = "the engine's scheduler is vLLM's own"
                if "answers" not in json.loads(answer):  # an engine of a pair answers other questions
                    self._stock = why
                raise EngineStock(why)
        return answers

    async def _call(self, op: str, payload: str) -> list[Any]:
        core = self._core()
        call_all = getattr(core, "call_utility_all_async", None)
        call_one = getattr(core, "call_utility_async", None)
        try:
            if call_all is not None:
                return list(await call_all(UTILITY, op, payload))
            if call_one is not None:
                return [await call_one(UTILITY, op, payload)]
        except EngineDeadError as error:
            raise EngineUnavailable("the engine is dead") from error
        except Exception as error:  # a failed utility call arrives as a bare Exception with its text
            if _NO_METHOD.search(str(error)):
                self._stock = str(error)
                raise EngineStock(self._stock) from error
            if _SHUTTING_DOWN in str(error):
                raise EngineUnavailable("the engine is shutting down") from error
            raise EngineError(f"{op}: {error}") from error
        self._stock = f"{type(core).__name__} has no utility calls"
        raise EngineStock(self._stock)

    def _core(self) -> Any:
        client = self._client() if self._client is not None else None
        if client is None:
            raise EngineUnavailable("the server has no engine yet, or no longer")
        return getattr(client, "engine_core", None)
