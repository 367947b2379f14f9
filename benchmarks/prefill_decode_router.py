"""The gateway's routing core without a gateway. It chooses the engines and the side that reads KV from
storage; a request is then sent as a prefill and a decode request, as the gateway does, and measured.

The core decides from its own records. A gateway also polls engines for the queues of their links; here no
queue is reported (``NicQueueReported``). The stored part of a prompt is known exactly, not learned from
answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx
from prefill_decode_engines import MEGABYTES_S, PATIENCE_S, TOKEN_BYTES, Engine
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.generation_request import decode_body, parse_transfer_params, prefill_body
from sojourn_server.policies.prefill_decode.engine_pair_scheduler import (
    FULL_BLOCK_TOKENS,
    PairScheduler,
    PrefillDecodeRules,
)
from sojourn_server.routing.pair_strategy import PairStrategy
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_events import (
    FirstByteSent,
    KvReported,
    PairEngineRegistered,
    PrefillFinished,
    RequestFinished,
    RequestReceived,
    SendRequest,
)

API = ClientApi.COMPLETIONS
TENANT = "benchmark"


class RoutingQuery(NamedTuple):
    """A request that every arm sends."""

    name: str
    prompt: list[int]
    stored_blocks: int
    """Number of the prompt's Full Blocks in storage."""


class Router:
    """The gateway's routing core for one arm, with the parts of a gateway that the core needs."""

    def __init__(
        self, engines: Sequence[Engine], decode_reads: Callable[[float, float], bool], pool_tokens: int
    ) -> None:
        pairs = PairScheduler(PrefillDecodeRules())
        pairs.decode_reads = decode_reads
        self._core = RoutingCore(PairStrategy(pairs))
        self._engines = {engine.name: engine for engine in engines}
        self._waiting: dict[str, asyncio.Future[SendRequest]] = {}
        self._sent: dict[str, SendRequest] = {}
        for engine in engines:
            seen = PairEngineRegistered(
                replica_id=engine.name,
                instance=engine.name,
                role=engine.role,
                node=engine.name,
                capacity_tokens=pool_tokens,
                block_s=FULL_BLOCK_TOKENS * TOKEN_BYTES / (MEGABYTES_S * 1e6),
                peer=engine.peer,
            )
            self._take(seen)

    def know(self, question: RoutingQuery) -> None:
        """Tell the core that a request was answered before, so that its KV is in storage, and there alone."""
        name = f"before {question.name}"
        self._take(self._asked(name, question))
        (send,) = self._sent.values()
        self._sent.clear()
        self._take(PrefillFinished(request_id=name, replica_id=send.prefill_id))
        self._take(FirstByteSent(request_id=name, replica_id=send.replica_id))
        self._take(RequestFinished(request_id=name, replica_id=send.replica_id))
        self._take(KvReported(replica_id=send.prefill_id, instance=send.prefill_id, programs=()))

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
            if not isinstance(action, SendRequest):
                raise RuntimeError(f"the core says {action}")
            self._sent[action.request_id] = action

    def _hand_out(self) -> None:
        for name, send in self._sent.items():
            self._waiting[name].set_result(send)
        self._sent.clear()


class PairResponse(NamedTuple):
    """Answer of the decode engine, and times in seconds since the request was sent."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prefilled_s: float
    """Seconds until the prefill engine had answered."""
    first_s: float
    """Seconds until the decode engine's first token."""


def http_client() -> httpx.AsyncClient:
    """Return the HTTP client for all requests of a run."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=PATIENCE_S, limits=limits, trust_env=False)


def text_of(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    """Return the body of the request that a client would send."""
    return json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        }
    ).encode()


async def through(
    http: httpx.AsyncClient,
    prefill: Engine,
    decode: Engine,
    body: bytes,
    transfer: str,
    decode_reads: bool,
    prefilled: Callable[[], None] = lambda: None,
    began: Callable[[], None] = lambda: None,
) -> PairResponse:
    """Send a request to the prefill engine, then to the decode engine, and return the answer. Calls
    ``prefilled`` after the prefill engine's answer, and ``began`` at the first token. Raises
    ``httpx.HTTPError`` or ``RuntimeError`` if an engine fails."""
    sent_s = time.monotonic()
    first = await _post(http, prefill, prefill_body(API, body, transfer, decode.peer, decode_reads))
    told = parse_transfer_params(first)
    if told is None:
        raise RuntimeError(f"{prefill.name} does not say where the KV is: {first[:200]!r}")
    prefilled_s = time.monotonic() - sent_s
    prefilled()
    tokens: list[int] = []
    logprobs: list[float] = []
    first_s = 0.0
    async with http.stream(
        "POST", decode.url + API.value, content=decode_body(body, told), headers=_JSON
    ) as answer:
        if answer.is_error:
            raise RuntimeError(
                f"{decode.name} answers {answer.status_code}: {(await answer.aread())[:300]!r}"
            )
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{decode.name}: {event['error']}")
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    if not tokens:
                        first_s = time.monotonic() - sent_s
                        began()
                    tokens += choice["token_ids"]
                    logprobs += choice["logprobs"]["token_logprobs"]
    return PairResponse(tuple(tokens), tuple(logprobs), prefilled_s, first_s)


_JSON = {"Content-Type": "application/json"}


async def _post(http: httpx.AsyncClient, engine: Engine, body: bytes) -> bytes:
    answer = await http.post(engine.url + API.value, content=body, headers=_JSON)
    if answer.is_error:
        raise RuntimeError(f"{engine.name} answers {answer.status_code}: {answer.content[:300]!r}")
    return answer.content
