"""The gateway's core in place of a gateway: who computes, who writes and, by any policy, who reads.

It decides by its own books alone. A gateway polls engines for what waits for their links as well; here nobody
tells of queues (``NicTold``), and how much of a prompt is stored is told exactly, not learnt of answers.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
from pd_engines import Engine
from pd_legs import Answered, text_of, through
from sojourn_server.gateway.core.facts import Asked, Began, Ended, Prefilled
from sojourn_server.gateway.pd.core import PdCore
from sojourn_server.gateway.pd.facts import EngineSeen, SendPair
from sojourn_server.policy.pd_pairs import PairScheduler
from sojourn_server.policy.pd_read_side import ReadSidePolicy
from sojourn_server.policy.pd_views import FULL_BLOCK_TOKENS

TOKEN_BYTES = 512
"""KV of a token of the model ``tiny`` in 32-bit floats."""
TENANT = "benchmark"


class Question(NamedTuple):
    """A request that every arm sends."""

    name: str
    prompt: list[int]
    stored_blocks: int
    """Full Blocks that storage has of it."""


class Router:
    """The gateway's core for one arm, and what it needs of a gateway around it."""

    def __init__(self, engines: Sequence[Engine], side: ReadSidePolicy, options: argparse.Namespace) -> None:
        self._core = PdCore(PairScheduler(side=side))
        self._engines = {engine.name: engine for engine in engines}
        self._waiting: dict[str, asyncio.Future[SendPair]] = {}
        self._sent: dict[str, SendPair] = {}
        for engine in engines:
            seen = EngineSeen(
                replica_id=engine.name,
                instance=engine.name,
                role=engine.role,
                node=engine.name,
                kv_tokens=options.pool_tokens,
                block_s=FULL_BLOCK_TOKENS * TOKEN_BYTES / (options.megabytes_s * 1e6),
                peer=engine.peer,
            )
            self._take(seen)

    def know(self, question: Question) -> None:
        """It was asked before, and is in storage."""
        name = f"before {question.name}"
        self._take(self._asked(name, question))
        (send,) = self._sent.values()
        self._sent.clear()
        self._take(Prefilled(request_id=name, replica_id=send.prefill_id))
        self._take(Began(request_id=name, replica_id=send.replica_id))
        self._take(Ended(request_id=name, replica_id=send.replica_id))

    async def answer(
        self, http: httpx.AsyncClient, model: str, question: Question, transfer: str, tokens: int
    ) -> Answered:
        """As the gateway would."""
        self._waiting[transfer] = asyncio.get_running_loop().create_future()
        self._take(self._asked(transfer, question))
        self._hand_out()
        send = await self._waiting.pop(transfer)
        prefill, decode = self._engines[send.prefill_id], self._engines[send.replica_id]

        def tell(fact: Prefilled | Began | Ended) -> None:
            self._take(fact)
            self._hand_out()

        answered = await through(
            http, prefill, decode, text_of(model, question.prompt, tokens), transfer, send.decode_share,
            lambda: tell(Prefilled(request_id=transfer, replica_id=send.prefill_id)),
            lambda: tell(Began(request_id=transfer, replica_id=send.replica_id)),
        )  # fmt: skip
        tell(Ended(request_id=transfer, replica_id=send.replica_id))
        return answered

    @staticmethod
    def _asked(name: str, question: Question) -> Asked:
        return Asked(
            request_id=name,
            tenant=TENANT,
            context_tokens=len(question.prompt),
            program_id=question.name,
            exact=True,
        )

    def _take(self, fact: Any) -> None:
        for action in self._core.take(fact, time.monotonic()):
            if not isinstance(action, SendPair):
                raise RuntimeError(f"the core says {action}")
            self._sent[action.request_id] = action

    def _hand_out(self) -> None:
        for name, send in self._sent.items():
            self._waiting[name].set_result(send)
        self._sent.clear()
