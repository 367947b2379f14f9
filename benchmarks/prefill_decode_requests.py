"""Sends one request as a prefill and a decode request, as the gateway does, and measures it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import httpx
from prefill_decode_engines import PATIENCE_S, Engine
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.prefill_decode_bodies import decode_body, parse_transfer_params, prefill_body

API = ClientApi.COMPLETIONS


class PairResponse(NamedTuple):
    """Answer of the decode engine, and times in seconds since the request was sent."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prefilled_s: float
    """Seconds until the prefill engine had answered."""
    first_s: float
    """Seconds until the decode engine's first token."""
    done_s: float


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
    return PairResponse(tuple(tokens), tuple(logprobs), prefilled_s, first_s, time.monotonic() - sent_s)


async def whole(http: httpx.AsyncClient, engine: Engine, body: bytes) -> None:
    """Send a request that one engine prefills and decodes. Raises ``httpx.HTTPError`` or ``RuntimeError``."""
    await _post(http, engine, body)


_JSON = {"Content-Type": "application/json"}


async def _post(http: httpx.AsyncClient, engine: Engine, body: bytes) -> bytes:
    answer = await http.post(engine.url + API.value, content=body, headers=_JSON)
    if answer.is_error:
        raise RuntimeError(f"{engine.name} answers {answer.status_code}: {answer.content[:300]!r}")
    return answer.content
