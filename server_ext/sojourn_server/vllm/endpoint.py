"""Adds sojourn's routes to vLLM's API server.

``SojournEndpoint`` is a ``vllm.endpoint_plugins`` entry point, which vLLM loads only if ``VLLM_PLUGINS``
names ``sojourn``. The engine answers through ``EngineCore.sojourn_call``, which ``plugin.py`` adds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from sojourn.config import local_url

from sojourn_server.api.api_keys import ApiKeys
from sojourn_server.api.engine_rpc import (
    EngineError,
    EngineUnavailableError,
    StockEngineError,
    is_stock_answer,
)
from sojourn_server.api.event_intake import EventIntake
from sojourn_server.api.identity_middleware import IdentityMiddleware
from sojourn_server.api.prometheus_bridge import bridge_for, poll_forever
from sojourn_server.api.routes import build_router

from ..launch.serve_command import SCHEDULER_CLS
from .compat import EngineDeadError, envs
from .plugin import METHOD
from .plugin_settings import PluginSettings, SettingsError

if TYPE_CHECKING:
    from .compat import EngineClient

STREAMS_END_S = 10.0
"""Seconds after the engine's stop in which clients can read the end of their answers."""

READY_POLL_S = 0.1

logger = logging.getLogger("vllm.sojourn")


class SojournEndpoint:
    """Implements vLLM's endpoint plugin protocol (``vllm/plugins/endpoint_plugins/interface.py``)."""

    name = "sojourn"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine = VllmEngine()
        self._keys = ApiKeys()
        self._poller: asyncio.Task[None] | None = None
        self._announcer: asyncio.Task[None] | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add sojourn's routes, which reject all requests until ``init_state`` has run, and its
        middleware."""
        events = EventIntake(self._engine)
        app.include_router(build_router(self._engine, self._keys, events))
        # vLLM adds its middleware later, so it is outside this one and checks the API key first.
        settings = PluginSettings.read(getattr(getattr(app.state, "args", None), "additional_config", None))
        app.add_middleware(
            IdentityMiddleware, keys=self._keys, events=events, session_header=settings.session_header
        )

    async def init_state(self, engine_client: EngineClient | None, state: Any, args: Namespace) -> None:
        # As in vLLM's own check, the environment variable counts only without --api-key.
        self._keys.configure(key for key in (getattr(args, "api_key", None) or [envs.VLLM_API_KEY]) if key)
        if engine_client is None:
            return
        self._engine.connect(engine_client)
        if getattr(args, "scheduler_cls", None) == SCHEDULER_CLS:
            await _check_scheduler(self._engine, engine_client)
        _end_requests_with_engine(engine_client, state)
        # The task has a weak reference to the engine and ends with it, or with the event loop.
        self._poller = asyncio.create_task(
            poll_forever(weakref.ref(self._engine), bridge_for()), name="sojourn-metrics"
        )
        url = server_url(args)
        if url is not None:
            text = ready_text(url, getattr(engine_client, "vllm_config", None))
            self._announcer = asyncio.create_task(_announce(text, state), name="sojourn-ready")


async def _check_scheduler(engine: VllmEngine, engine_client: EngineClient) -> None:
    """Raise ``SettingsError`` if the engine does not run sojourn's scheduler, which was asked for."""
    with suppress(EngineUnavailableError):  # vLLM reports that
        try:
            await engine.call("capabilities", "{}")
        except StockEngineError:
            runs = engine_client.vllm_config.scheduler_config.scheduler_cls
            raise SettingsError(
                f"the engine runs the scheduler {runs or 'of vLLM'}, but --scheduler-cls asks for sojourn's: "
                "another plugin or the platform has replaced it. Leave that plugin out (VLLM_PLUGINS names "
                "the plugins to load), or serve with --policy stock"
            ) from None


def server_url(args: Namespace) -> str | None:
    """Return the URL of the server that vLLM starts, as seen from this machine, if it has a port."""
    port = getattr(args, "port", None)
    if port is None or getattr(args, "uds", None):
        return None
    scheme = "https" if getattr(args, "ssl_certfile", None) else "http"
    return local_url(getattr(args, "host", None), port, scheme)


def ready_text(url: str, vllm_config: Any) -> str:
    """Return where the server answers and what to do next. An engine of a pair serves behind a gateway."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    role = transfer.kv_connector_extra_config.get("role") if transfer is not None else None
    step = f"run an agent with: sojourn run --url {url} -- python agent.py"
    if role is not None:
        urls = {"prefill": "http://HOST:PORT", "decode": "http://HOST:PORT", role: url}
        step = f"it serves behind a gateway: sojourn gateway --prefill {urls['prefill']}"
        step += f" --decode {urls['decode']}"
    return f"sojourn: ready at {url}, live page {url}/sojourn; {step}"


async def _announce(text: str, state: Any) -> None:
    """Wait until the HTTP server runs, then log ``text``."""
    while not getattr(getattr(state, "server", None), "started", False):
        await asyncio.sleep(READY_POLL_S)
    logger.info("%s", text)


def _end_requests_with_engine(engine_client: EngineClient, state: Any) -> None:
    """Make ``engine_client.shutdown`` end every open request with an error. vLLM's own stops the task that
    delivers outputs, but notifies no open request: after SIGTERM clients would wait for ever, and the server
    for the clients (vLLM pull request 36964)."""
    client: Any = engine_client
    shutdown, loop = client.shutdown, asyncio.get_running_loop()

    def end_requests() -> None:
        client.output_processor.propagate_error(EngineDeadError())
        server = getattr(state, "server", None)
        if server is not None and server.config.timeout_graceful_shutdown is None:
            # Without a limit, a client that reads nothing would keep the server running.
            server.config.timeout_graceful_shutdown = STREAMS_END_S

    def shutdown_and_end_requests(*args: Any, **kwargs: Any) -> None:
        try:
            shutdown(*args, **kwargs)
        finally:
            with suppress(RuntimeError):  # vLLM calls ``shutdown`` again when the loop is closed
                loop.call_soon_threadsafe(end_requests)

    client.shutdown = shutdown_and_end_requests


class VllmEngine:
    """Implements ``EngineRpc`` with vLLM's engine client, to which it keeps a weak reference."""

    def __init__(self) -> None:
        self._client: weakref.ref[Any] | None = None
        self._stock: str | None = None

    def connect(self, engine_client: EngineClient) -> None:
        self._client = weakref.ref(engine_client)

    def engine_ids(self) -> Sequence[str]:
        """Return the engines' ranks as text, as in the label ``engine`` of vLLM's metrics."""
        # An engine's address is its rank in two bytes, little endian.
        return [str(int.from_bytes(address, "little")) for address in self._core().core_engines]

    async def call(self, op: str, payload: str) -> list[str]:
        """Return the engines' JSON answers to an operation, in the order of ``engine_ids``. Raises
        ``EngineError``; its subclass ``StockEngineError`` if an engine runs without sojourn."""
        if self._stock is not None:
            # Another call would write another traceback into the engine's log.
            raise StockEngineError(self._stock)
        core = self._core()
        try:
            answers: list[str] = list(await core.call_utility_all_async(METHOD, op, payload))
        except EngineDeadError as error:
            raise EngineUnavailableError("the engine is dead") from error
        except Exception as error:  # vLLM raises a failed utility call as a bare Exception
            if "shutting down" in str(error):
                raise EngineUnavailableError("the engine is shutting down") from error
            raise EngineError(f"{op}: {error}") from error
        for answer in answers:
            if is_stock_answer(answer):
                why = "the engine's scheduler is vLLM's own"
                if "answers" not in json.loads(answer):  # an engine of a pair answers some operations
                    self._stock = why
                raise StockEngineError(why)
        return answers

    def _core(self) -> Any:
        client = self._client() if self._client is not None else None
        if client is None:
            raise EngineUnavailableError("the server has no engine: it is starting or has lost it")
        return client.engine_core
