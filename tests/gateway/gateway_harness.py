"""A gateway over fake engines, both with real connections, in one event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvicorn
from fake_engine import FakeEngine
from sojourn_server.gateway.http.gateway_app import Gateway, GatewayOptions, build_gateway
from sojourn_server.gateway.http.gateway_server import ClientProtocol
from sojourn_server.gateway.http.peers import Peers
from sojourn_server.gateway.http.tenant_keys import TenantKeys
from sojourn_server.policies.cluster_preset import parse_cluster_preset
from sojourn_server.routing.routing_events import PairRole
from sojourn_server.routing.routing_from_preset import PrefillDecodeRules
from sojourn_server.routing.routing_limits import RoutingLimits

DEADLINE_S = 60.0
KEYS = {"key-a": "a", "key-b": "b"}
"""Tenants by their keys."""


@dataclass
class World:
    """A gateway, its URL, and an HTTP client."""

    gateway: Gateway
    url: str
    http: aiohttp.ClientSession

    @property
    def core(self) -> Any:
        """The gateway's routing core."""
        return self.gateway.routing_backend.core

    async def send(
        self,
        path: str,
        key: str | None = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> aiohttp.ClientResponse:
        """Send a request. The answer's body has been read unless it is a stream of events."""
        sent = {**(headers or {}), **({"Authorization": f"Bearer {key}"} if key is not None else {})}
        answer = await self.http.request(method, self.url + path, headers=sent, **more)
        if answer.content_type != "text/event-stream":
            await answer.read()
        return answer

    async def chat(
        self, program: str | None = None, key: str | None = None, text: str = "hi", **more: Any
    ) -> aiohttp.ClientResponse:
        """Send a chat completion."""
        session = {"X-Session-ID": program} if program is not None else {}
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}
        return await self.send("/v1/chat/completions", key, headers=session, json=body)

    async def events(self, *events: dict[str, Any], key: str | None = None, emitter: str = "e") -> list[Any]:
        """Report events, and return their outcomes."""
        batch = {"v": 1, "emitter": emitter, "events": list(events)}
        answer = await self.send("/sojourn/v1/events", key, json=batch)
        assert answer.status == 200, await answer.text()
        return list((await answer.json())["outcomes"])

    async def get(self, path: str, key: str | None = None) -> Any:
        """Return the JSON of a GET."""
        return await (await self.send(path, key, method="GET")).json()

    async def metrics(self) -> str:
        """Return the page of metrics."""
        return await (await self.send("/metrics", method="GET")).text()

    async def drain(self, replica: str, word: str = "drain") -> Any:
        """Let a replica's programs move at their next turns, or with ``stay`` no longer."""
        path = f"/sojourn/v1/replicas/{replica.replace('/', '%2F')}/{word}"
        answer = await self.send(path, "root")
        assert answer.status == 200, await answer.text()
        return await answer.json()


def hint(program: str, *events: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The field of a body for a program's hint with events. ``more``: other members of the hint."""
    own = {"v": 1, "emitter": "em", "events": list(events)}
    context = {"program_id": program, "sojourn": own, **more}
    return {"vllm_xargs": {"agentic_context": json.dumps(context), "other": 1}}


@asynccontextmanager
async def world(
    fakes: list[FakeEngine],
    *,
    preset: str = 'routing = "session-affinity"',
    rules: PrefillDecodeRules | None = None,
    roles: Mapping[str, PairRole] | None = None,
    tenants: dict[str, str] | None = None,
    poll_s: float = 0.05,
    limits: RoutingLimits | None = None,
    known: int | None = None,
    port: int = 0,
    peers: Peers | None = None,
    **options: Any,
) -> AsyncIterator[World]:
    """Run a gateway that knows all of the engines, or ``known`` of them. ``rules``: those for pairs, in place
    of the preset. ``roles``: of their engines, by URL. ``port``: where it listens; 0: any free one."""
    gateway, app = build_gateway(
        roles or [fake.url for fake in fakes],
        rules or parse_cluster_preset(preset, source="test"),
        TenantKeys(tenants),
        GatewayOptions(**options),
        limits=limits,
        poll_s=poll_s,
        peers=peers,
    )
    bound = socket.socket(proto=socket.IPPROTO_TCP)
    bound.bind(("127.0.0.1", port))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=ClientProtocol,
            log_level="error",
            ws="none",
            loop="asyncio",
            timeout_graceful_shutdown=1,
        )
    )
    task = asyncio.ensure_future(server._serve(sockets=[bound]))
    await until(lambda: server.started)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    most = len(fakes) if known is None else known
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
            await until(lambda: len(gateway.routing_backend.replicas()) >= most)
            yield World(gateway, url, http)
    finally:
        server.should_exit = True
        await task


async def until(holds: Callable[[], Any], deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition, a function or a coroutine function. Fails after ``deadline_s``, by default a
    minute."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while True:
        held = holds()
        if asyncio.iscoroutine(held):
            held = await held
        if held:
            return
        assert loop.time() < end, "waited for a minute"
        await asyncio.sleep(0.01)


async def lines(answer: aiohttp.ClientResponse) -> list[str]:
    """Return the data of a stream's events."""
    text = (await answer.read()).decode()
    return [line[6:] for line in text.splitlines() if line.startswith("data: ")]
