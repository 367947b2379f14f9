"""The generation routes: check and parse a request, then run it as a ``ProxyRequest``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from . import proxy_headers
from .client_apis import ClientApi
from .disconnect_watcher import DisconnectWatcher
from .error_responses import INVALID_KEY, AsgiSend, RequestRejected
from .generation_request import InvalidGenerationRequest, parse_generation_request
from .proxy_headers import RawHeaders
from .proxy_request import LARGE_BODY_BYTES, SESSION, AsgiScope, ParsedRequest, ProxyContext, ProxyRequest
from .request_bodies import AsgiReceive, BodyBudget, BodyRejected, RequestBody
from .tenant_keys import TenantKeys


class GenerationRoutes:
    """All generation routes of a gateway, in one event loop."""

    def __init__(
        self,
        shared: ProxyContext,
        tenants: TenantKeys,
        bodies: BodyBudget | None = None,
        *,
        reads_prefixes: bool = False,
    ) -> None:
        self._shared = shared
        self._tenants = tenants
        self._names = shared.forwarder.names
        self._reads_prefixes = reads_prefixes
        self.bodies = bodies or BodyBudget()

    def route(self, api: ClientApi) -> Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]:
        """The ASGI application of one API."""

        async def app(scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
            await self._serve(api, scope, receive, send)

        return app

    async def _serve(self, api: ClientApi, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        raw: RawHeaders = scope["headers"]
        try:
            tenant = self._tenants.of(
                proxy_headers.first_value(raw, b"authorization"), proxy_headers.first_value(raw, b"x-api-key")
            )
            if tenant is None:
                raise RequestRejected(
                    401, INVALID_KEY, "missing or unknown API key; expected one of the gateway's"
                )
            if proxy_headers.first_value(raw, b"content-encoding") not in (None, "identity"):
                raise RequestRejected(415, "encoded_body", "the body is compressed; expected plain JSON")
        except RequestRejected as refused:
            await self._shared.refuse(send, api, refused)
            return
        held = self.bodies.begin(tenant)
        try:
            await self._exchange(api, scope, receive, send, tenant, held)
        finally:
            held.free()

    async def _exchange(
        self,
        api: ClientApi,
        scope: AsgiScope,
        receive: AsgiReceive,
        send: AsgiSend,
        tenant: str,
        held: RequestBody,
    ) -> None:
        raw: RawHeaders = scope["headers"]
        try:
            body = await held.read(proxy_headers.first_value(raw, b"content-length"), receive)
            if body is None:
                return
            read = await self._read(api, body, proxy_headers.first_value(raw, SESSION), tenant)
            del body  # from here on in the engines' form
            held.becomes(len(read.body))
            exchange = ProxyRequest(self._shared, api, scope, send, tenant, read, held)
            del read
        except BodyRejected as refused:
            told = RequestRejected(refused.status, refused.code, str(refused), refused.retry_after_s)
            await self._shared.refuse(send, api, told)
            return
        except InvalidGenerationRequest as error:
            await self._shared.refuse(send, api, RequestRejected(400, "bad_request", str(error)))
            return
        except Exception:
            await self._shared.send_internal_error(send, api)
            return
        watch = DisconnectWatcher(receive, exchange.request_state)
        try:
            await exchange.run()
        except Exception:
            if exchange.has_begun:
                raise  # the server closes the connection, so that the answer does not look complete
            await self._shared.send_internal_error(send, api)
        finally:
            watch.stop()

    async def _read(self, api: ClientApi, body: bytes, session: str | None, tenant: str) -> ParsedRequest:
        def read() -> ParsedRequest:
            question = parse_generation_request(api, body, session)
            prefix = question.prefix() if self._reads_prefixes else ()
            named, fits = self._names.request(tenant, body, question)
            if named is not body:
                question = question.of(named)
            return ParsedRequest(named, question, prefix, fits)

        return read() if len(body) < LARGE_BODY_BYTES else await asyncio.to_thread(read)
