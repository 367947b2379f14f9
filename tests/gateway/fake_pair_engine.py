"""Prefill and decode engines for tests of a gateway of pairs, and a gateway in front of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fake_engine import FakeEngine, running
from gateway_harness import World, world
from sojourn_server.routing.routing_events import PairRole
from sojourn_server.routing.routing_from_preset import PrefillDecodeRules
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse


class PairEngine(FakeEngine):
    """Computes a prompt and says where its KV is, or answers, depending on the request."""

    def __init__(self, role: PairRole) -> None:
        super().__init__()
        self.role = role
        self.node: str | None = None
        self.epoch = "e1"
        self.model = "tiny"
        self.paths: dict[str, Any] = {}
        """Fields that replace those of ``paths`` in its capabilities."""
        self.tells_paths = True
        self.queued_s = 0.0
        self.says_nothing = False
        """Whether it computes prompts without saying where their KV is."""
        self.refuses: int | None = None
        """Status of its answers to requests that generate; ``None`` for normal answers."""
        self.prompt_tokens = 100
        """Prompt tokens that it reports for each request."""
        self.capabilities_fail = False

    @property
    def at_node(self) -> str:
        return self.node or f"node-{self.port}"

    @property
    def peer(self) -> str:
        return f"tcp:127.0.0.1:{self.port}"

    async def restart(self) -> None:
        """Restart the process and its traffic manager."""
        self.epoch += "'"
        await super().restart()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.model, "max_model_len": 4096}]})

    async def _capabilities(self, request: Request) -> Response:
        if self.capabilities_fail:
            return JSONResponse({"error": "busy"}, 500)
        told = json.loads(bytes((await super()._capabilities(request)).body))
        paths = {
            "role": self.role.value,
            "peer": self.peer,
            "node": self.at_node,
            "epoch": self.epoch,
            "block_s": 0.001,
            "block_bytes": 4096,
            "block_tokens": 64,
            "kv": "k",
            **self.paths,
        }
        return JSONResponse({**told, "tiers": None, "paths": paths if self.tells_paths else None})

    def pair_load(self) -> dict[str, Any]:
        if not self.tells_paths:
            return {}
        link = {"queued_bytes": 0, "queued_s": 0.0, "moved_bytes": 7}
        links = {
            "storage read": {**link, "queued_s": self.queued_s},
            "storage write": link,
            "compute network": link,
        }
        return {"links": links, "epoch": self.epoch}

    async def _generate(self, request: Request) -> Response:
        answer = await super()._generate(request)
        if self.refuses is not None:
            return JSONResponse({"error": {"message": "no", "code": self.refuses}}, self.refuses)
        asked = self.requests[-1].get("kv_transfer_params") or {}
        if answer.status_code == 200 and not isinstance(answer, StreamingResponse):
            told = json.loads(bytes(answer.body))
            answer = JSONResponse({**told, "usage": {**told["usage"], "prompt_tokens": self.prompt_tokens}})
        if not asked.get("do_remote_decode") or self.says_nothing or answer.status_code != 200:
            return answer
        document = json.loads(bytes(answer.body))
        told = {"do_remote_prefill": True, "transfer": asked["transfer"], "at": self.name}
        return JSONResponse({**document, "kv_transfer_params": told})


@asynccontextmanager
async def pair_engines(prefill: int, decode: int) -> AsyncIterator[tuple[list[PairEngine], list[PairEngine]]]:
    """Run this many engines of each role."""
    engines = [PairEngine(PairRole.PREFILL) for _ in range(prefill)] + [
        PairEngine(PairRole.DECODE) for _ in range(decode)
    ]
    async with running(*engines):
        yield engines[:prefill], engines[prefill:]


def gateway_of(
    prefill: list[PairEngine],
    decode: list[PairEngine],
    *,
    taken: int | None = None,
    read_side: str = "shorter",
    **options: Any,
) -> AbstractAsyncContextManager[World]:
    """Run a gateway in front of the engines. Yields it when it knows ``taken`` of them, or all."""
    rules = PrefillDecodeRules(read_side=read_side)
    roles = {one.url: PairRole.PREFILL for one in prefill} | {one.url: PairRole.DECODE for one in decode}
    return world([*prefill, *decode], rules=rules, roles=roles, known=taken, **options)


@asynccontextmanager
async def pairs(
    prefill: int, decode: int, **options: Any
) -> AsyncIterator[tuple[World, list[PairEngine], list[PairEngine]]]:
    """Run a gateway in front of this many engines of each role."""
    async with pair_engines(prefill, decode) as (first, second), gateway_of(first, second, **options) as it:
        yield it, first, second
