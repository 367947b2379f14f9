"""Gateways that serve the same engines and share nothing.

A program belongs to the gateway that a rendezvous hash of its tenant and id names among those that answer.
When a gateway goes, only its own programs get another owner. Any other gateway passes their requests and
events on, once (``PASSED`` marks it). If the owner cannot be reached, the gateway decides itself: it asks the
engines which programs have KV, so most turns still go where their KV is.

Requests without a program stay where they arrive. Of prefill and decode engines one gateway decides all
requests. Each gateway counts waiting requests and tenants' shares of what it decides itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from sojourn.wire_codec import (
    EVENTS_PATH,
    EventBatch,
    EventOutcome,
    WireError,
    decode_event,
    decode_outcomes,
    encode,
)
from starlette.types import Receive, Send

from .client_apis import (
    GATEWAY_STOPPING,
    REPLICA_LOST,
    ClientApi,
    RequestRejected,
    error_event,
    send_rejection,
)
from .engine_client import (
    PASSED,
    EngineAnswer,
    EngineClient,
    EngineHeaders,
    RawHeaders,
    ReplicaRequestError,
    ResponseMeter,
    ask_engine,
    end_to_end_headers,
    engine_request_headers,
)
from .program_events import FORWARD_TIMEOUT_S, ProgramEvents

logger = logging.getLogger(__name__)

UNREAD_TIMEOUT_S = 60.0
"""Seconds within which a client must take the next part of an answer."""
CHECK_S = 1.0
"""Seconds between two checks whether another gateway answers."""
CHECK_TIMEOUT_S = 6.0
"""Seconds within which a gateway has to answer a check, long enough for a slow one."""
POST_TIMEOUT_S = FORWARD_TIMEOUT_S + 1.0
"""Seconds to wait for another gateway, which keeps events whose engine does not answer: two must not."""


@dataclass(slots=True)
class _Peer:
    """Another gateway."""

    url: str
    is_alive: bool = False
    client: EngineClient = field(default_factory=EngineClient)
    """Connections to this gateway alone, which are closed when it hangs."""


class Peers:
    """The other gateways, as one of them sees them."""

    def __init__(self, own_url: str = "", urls: Iterable[str] = ()) -> None:
        """``own_url``: the address by which the others know this gateway. ``urls``: of all gateways."""
        self._own_url = own_url
        self.others = {url: _Peer(url) for url in urls if url != own_url}
        self.in_pairs = False
        """Whether engines work in pairs. Then one gateway counts the requests at each decode engine."""

    async def set_urls(self, urls: Iterable[str]) -> None:
        """Replace the list of gateways. Those that are not listed stay while they answer."""
        listed = [url for url in urls if url != self._own_url]
        for url in listed:
            self.others.setdefault(url, _Peer(url))
        for url, peer in list(self.others.items()):
            if url not in listed and not peer.is_alive:
                del self.others[url]
                await peer.client.close()

    @property
    def alive(self) -> list[str]:
        return [url for url, peer in self.others.items() if peer.is_alive]

    def owner(self, tenant: str, program_id: str | None) -> str | None:
        """Return the URL of the gateway that decides a program's requests; ``None``: this one does."""
        if self.in_pairs:
            tenant = program_id = ""
        alive = self.alive
        if not alive or program_id is None:
            return None
        found = owner_of([self._own_url, *alive], tenant, program_id)
        return found if found != self._own_url else None

    # -- whether they are there -------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self.check_all()
            await asyncio.sleep(CHECK_S)

    async def close(self) -> None:
        for peer in self.others.values():
            await peer.client.close()

    async def check_all(self) -> None:
        await asyncio.gather(*(self._check(peer) for peer in list(self.others.values())))

    async def _check(self, peer: _Peer) -> None:
        timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
        try:
            async with peer.client.session().get(f"{peer.url}/ping", timeout=timeout) as answer:
                await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            self._set_gone(peer)
            if isinstance(error, TimeoutError):  # it hangs; one that stops still finishes its requests
                await peer.client.close()
        else:
            if not peer.is_alive:
                logger.info("gateway %s answers", peer.url)
            peer.is_alive = True

    def _set_gone(self, peer: _Peer) -> None:
        if peer.is_alive:
            logger.warning("gateway %s does not answer; its programs go on at the others", peer.url)
        peer.is_alive = False

    # -- requests ---------------------------------------------------------------------

    async def pass_on(
        self, owner: str, api: ClientApi, scope: Any, body: bytes, receive: Receive, send: Send
    ) -> bool:
        """Pass a client's request on to a gateway, and the answer to the client. Return False if the gateway
        cannot be reached; then nothing was sent. The client's leave ends the request there too. Raises
        ``OSError`` if the client takes no part for ``UNREAD_TIMEOUT_S``."""
        passing = asyncio.ensure_future(self._pass_on(owner, api, scope, body, send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return passing.result() if passing.done() else True
        finally:
            for task in (passing, leaving):
                task.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)

    async def _pass_on(self, owner: str, api: ClientApi, scope: Any, body: bytes, send: Send) -> bool:
        """A stream that breaks off ends with an error event; another answer stays incomplete."""
        peer = self.others.get(owner)
        if peer is None:
            return False
        query = scope.get("query_string", b"").decode("latin-1")
        url = f"{owner}{api.value}{'?' if query else ''}{query}"
        answer: EngineAnswer | None = None
        failure: tuple[str, str] | None = None  # code and message with which the answer ends
        try:
            answer = await peer.client.send(url, _passed(scope["headers"]), body)
            meter = ResponseMeter(is_stream=answer.is_stream)
            headers = end_to_end_headers(answer.response.raw_headers)
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            chunk = answer.first
            while chunk:
                if whole := meter.push(chunk):
                    async with asyncio.timeout(UNREAD_TIMEOUT_S):
                        await send({"type": "http.response.body", "body": whole, "more_body": True})
                chunk = await answer.next_part()
            await send({"type": "http.response.body", "body": meter.rest()})
        except ReplicaRequestError:
            if answer is None:
                self._set_gone(peer)
                return False
            failure = REPLICA_LOST, "the gateway that was answering is gone; send the request again"
        except asyncio.CancelledError:  # this gateway stops, or the client has left
            failure = GATEWAY_STOPPING, "the gateway stops; send the request again"
            raise
        finally:
            if failure is not None:
                with contextlib.suppress(OSError):
                    if answer is None:
                        await send_rejection(send, api, RequestRejected(503, *failure, 5.0))
                    elif answer.is_stream:
                        await send({"type": "http.response.body", "body": error_event(api, *failure)})
            if answer is not None:
                answer.close()
        return True

    # -- events and drains ------------------------------------------------------------

    async def forward(
        self,
        events: ProgramEvents,
        batch: EventBatch,
        tenant: str,
        authorization: str | None,
        headers: RawHeaders | None,
        own_id: str | None = None,
    ) -> list[EventOutcome]:
        """Forward events to their programs' gateways, or from here to the engines. Return their outcomes in
        order. ``headers``: of the request that brought the events; ``None``: they are not passed on.
        ``own_id``: program whose events stay here."""
        parts: dict[str | None, list[int]] = {}
        for place, raw in enumerate(batch.events):
            owner = None
            if self.others and headers is not None:
                with contextlib.suppress(WireError):
                    program_id = decode_event(raw).program_id
                    owner = self.owner(tenant, program_id) if program_id != own_id else None
            parts.setdefault(owner, []).append(place)
        outcomes: dict[int, EventOutcome] = {}

        async def hand(owner: str | None, places: list[int]) -> None:
            part = msgspec.structs.replace(batch, events=[batch.events[place] for place in places])
            found: Sequence[EventOutcome] = ()
            if owner is not None:
                with contextlib.suppress(WireError):
                    answer = await self._post(owner, EVENTS_PATH, headers or (), encode(part))
                    found = decode_outcomes(answer).outcomes
            if len(found) != len(places):  # they are this gateway's, or their gateway is gone
                found = await events.forward_batch(part, tenant, authorization)
            outcomes.update(zip(places, found, strict=True))

        await asyncio.gather(*(hand(*one) for one in parts.items()))
        return [outcomes[place] for place in range(len(batch.events))]

    async def repeat(self, path: str, headers: RawHeaders) -> list[str]:
        """Repeat a client's order at all other gateways. Return the URLs of those that did not take it."""
        if is_passed(headers):
            return []
        alive = self.alive
        answers = await asyncio.gather(*(self._post(url, path, headers, b"") for url in alive))
        taken = {url for url, answer in zip(alive, answers, strict=True) if answer}
        return [url for url in self.others if url not in taken]

    async def _post(self, url: str, path: str, headers: RawHeaders, body: bytes) -> bytes:
        """Send a POST to another gateway. Return the body of its answer; empty if there is none."""
        peer = self.others.get(url)
        reply = peer and await ask_engine(
            peer.client.session(),
            url + path,
            method="POST",
            body=body,
            headers=_passed(headers),
            timeout_s=POST_TIMEOUT_S,
        )
        if reply and reply.status == 200:
            return reply.body
        logger.warning("gateway %s did not take %s", url, path)
        return b""


def owner_of(gateways: Iterable[str], tenant: str, program_id: str) -> str:
    """Return the gateway to which a program belongs, by a rendezvous hash (Thaler and Ravishankar 1998)."""
    name = f"\0{tenant}\0{program_id}".encode("utf-8", "replace")
    return max(gateways, key=lambda url: hashlib.blake2b(url.encode() + name, digest_size=8).digest())


def is_passed(headers: RawHeaders) -> bool:
    """Whether another gateway has passed a request on."""
    return any(name == PASSED.encode() for name, _ in headers)


def _passed(headers: RawHeaders) -> EngineHeaders:
    own = frozenset((b"host", b"content-length", b"expect"))
    passed = engine_request_headers(end_to_end_headers(headers), dropped=own, key=None, rank=None)
    passed[PASSED] = "1"
    return passed


async def _disconnected(receive: Receive) -> None:
    with contextlib.suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
