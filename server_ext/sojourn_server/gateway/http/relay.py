"""The routes that generate: a request is let in and read, and then an ``Exchange`` of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import aiohttp

from . import headers
from .apis import Api
from .bodies import Bodies, Body, BodyRefused, Receive
from .books import Books
from .client_watch import ClientWatch
from .decider import Decider
from .exchange import LARGE_BODY_BYTES, SESSION, Exchange, Means, Request, Scope
from .headers import Raw
from .moving import Mover
from .news import ProgramNews
from .question import BadQuestion, read_question
from .refusing import INVALID_KEY, Refused, Send
from .replicas import Replicas
from .tenants import Tenants


class Relay:
    """The routes that generate. One for all of them, in one event loop."""

    def __init__(
        self,
        decider: Decider,
        replicas: Replicas,
        tenants: Tenants,
        session: Callable[[], aiohttp.ClientSession],
        news: ProgramNews,
        mover: Mover,
        books: Books,
        *,
        engine_key: str | None = None,
        reads_prefixes: bool = False,
        bodies: Bodies | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engine_key``: shown to engines in place of the client's own."""
        self._tenants = tenants
        self._names = news.names
        self._reads_prefixes = reads_prefixes
        self.bodies = bodies or Bodies()
        self._means = Means(
            decider, replicas, session, news, mover, books, engine_key=engine_key, clock=clock
        )

    def route(self, api: Api) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """An ASGI application for one API."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(api, scope, receive, send)

        return app

    async def _serve(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        raw: Raw = scope["headers"]
        try:
            tenant = self._tenants.of(headers.one(raw, b"authorization"), headers.one(raw, b"x-api-key"))
            if tenant is None:
                raise Refused(401, INVALID_KEY, "missing or unknown API key; expected one of the gateway's")
            if headers.one(raw, b"content-encoding") not in (None, "identity"):
                raise Refused(415, "encoded_body", "the body is compressed; expected plain JSON")
        except Refused as refused:
            await self._means.refuse(send, api, refused)
            return
        held = self.bodies.begin(tenant)
        try:
            await self._exchange(api, scope, receive, send, tenant, held)
        finally:
            held.free()

    async def _exchange(
        self, api: Api, scope: Scope, receive: Receive, send: Send, tenant: str, held: Body
    ) -> None:
        raw: Raw = scope["headers"]
        try:
            body = await held.read(headers.one(raw, b"content-length"), receive)
            if body is None:
                return
            read = await self._read(api, body, headers.one(raw, SESSION), tenant)
            del body  # from here on as engines get it
            held.becomes(len(read.body))
            exchange = Exchange(self._means, api, scope, send, tenant, read, held)
            del read
        except BodyRefused as refused:
            told = Refused(refused.status, refused.code, str(refused), refused.retry_after_s)
            await self._means.refuse(send, api, told)
            return
        except BadQuestion as error:
            await self._means.refuse(send, api, Refused(400, "bad_request", str(error)))
            return
        except Exception:
            await self._means.say_failed(send, api)
            return
        watch = ClientWatch(receive, exchange.ticket)
        try:
            await exchange.run()
        except Exception:
            if exchange.has_begun:
                raise  # then the server closes the connection: an end that looks well would be a lie
            await self._means.say_failed(send, api)
        finally:
            watch.stop()

    async def _read(self, api: Api, body: bytes, session: str | None, tenant: str) -> Request:
        def read() -> Request:
            question = read_question(api, body, session)
            prefix = question.prefix() if self._reads_prefixes else ()
            named, fits = self._names.request(tenant, body, question)
            if named is not body:
                question = question.of(named)
            return Request(named, question, prefix, fits)

        return read() if len(body) < LARGE_BODY_BYTES else await asyncio.to_thread(read)
