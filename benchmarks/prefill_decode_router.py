"""The gateway's routing core without a gateway. It chooses the engines and the side that reads KV from
storage.

The core decides from its own records. A gateway also polls engines for the queues of their links; here no
queue is reported (``NicQueueReported``). The stored part of a prompt is known exactly, not learned from
answers.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
from prefill_decode_engines import Engine
from prefill_decode_requests import PairResponse, text_of, through
from sojourn_server.policies.prefill_decode.engine_pair_scheduler import PairScheduler
from sojourn_server.policies.prefill_decode.prefill_decode_views import FULL_BLOCK_TOKENS
from sojourn_server.policies.prefill_decode.read_side_policies import ReadSidePolicy
from sojourn_server.routing.pair_strategy import PairStrategy
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_events import (
    FirstByteSent,
    PairEngineRegistered,
    PrefillFinished,
    RequestFinished,
    RequestReceived,
    SendRequestToPair,
)

TOKEN_BYTES = 512
"""KV bytes per token of the model ``tiny`` in 32-bit floats."""
TENANT = "benchmark"


class RoutingQuery(NamedTuple):
    """A request that every arm sends."""

    name: str
    prompt: list[int]
    stored_blocks: int
    """Number of the prompt's Full Blocks in storage."""


class Router:
    """The gateway's routing core for one arm, with the parts of a gateway that the core needs."""

    def __init__(self, engines: Sequence[Engine], side: ReadSidePolicy, options: argparse.Namespace) -> None:
        self._core = RoutingCore(PairStrategy(PairScheduler(side=side)))
        self._engines = {engine.name: engine for engine in engines}
        self._waiting: dict[str, asyncio.Future[SendRequestToPair]] = {}
        self._sent: dict[str, SendRequestToPair] = {}
        for engine in engines:
            seen = PairEngineRegistered(
                replica_id=engine.name,
                instance=engine.name,
                role=engine.role,
                node=engine.name,
                capacity_tokens=options.pool_tokens,
                block_s=FULL_BLOCK_TOKENS * TOKEN_BYTES / (options.megabytes_s * 1e6),
                peer=engine.peer,
            )
            self._take(seen)

    def know(self, question: RoutingQuery) -> None:
        """Tell the core that a request was answered before, so that its KV is in storage."""
        name = f"before {question.name}"
        self._take(self._asked(name, question))
        (send,) = self._sent.values()
        self._sent.clear()
        self._take(PrefillFinished(request_id=name, replica_id=send.prefill_id))
        self._take(FirstByteSent(request_id=name, replica_id=send.replica_id))
        self._take(RequestFinished(request_id=name, replica_id=send.replica_id))

    async def answer(
        self, http: httpx.AsyncClient, model: str, question: RoutingQuery, transfer: str, tokens: int
    ) -> PairResponse:
        """Route and send a request as the gateway would. Return the answer."""
        self._waiting[transfer] = asyncio.get_running_loop().create_future()
        self._take(self._asked(transfer, question))
        self._hand_out()
        send = await self._waiting.pop(transfer)
        prefill, decode = self._engines[send.prefill_id], self._engines[send.replica_id]

        def tell(fact: PrefillFinished | FirstByteSent | RequestFinished) -> None:
            self._take(fact)
            self._hand_out()

        answered = await through(
            http, prefill, decode, text_of(model, question.prompt, tokens), transfer, send.decode_reads,
            lambda: tell(PrefillFinished(request_id=transfer, replica_id=send.prefill_id)),
            lambda: tell(FirstByteSent(request_id=transfer, replica_id=send.replica_id)),
        )  # fmt: skip
        tell(RequestFinished(request_id=transfer, replica_id=send.replica_id))
        return answered

    @staticmethod
    def _asked(name: str, question: RoutingQuery) -> RequestReceived:
        return RequestReceived(
            request_id=name,
            tenant=TENANT,
            context_tokens=len(question.prompt),
            program_id=question.name,
            exact=True,
        )

    def _take(self, fact: Any) -> None:
        for action in self._core.take(fact, time.monotonic()):
            if not isinstance(action, SendRequestToPair):
                raise RuntimeError(f"the core says {action}")
            self._sent[action.request_id] = action

    def _hand_out(self) -> None:
        for name, send in self._sent.items():
            self._waiting[name].set_result(send)
        self._sent.clear()
