"""Which clients may use a gateway's routes: the tenants' keys and the admin key."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from ...api.api_errors import ApiError
from .client_apis import GATEWAY, GATEWAY_FAILED, INVALID_KEY, api_error
from .gateway_metrics import GatewayMetrics
from .tenant_keys import TenantKeys

Handler = Callable[[Request], Awaitable[Response]]


class ClientAccess:
    """Checks the keys of clients, for all routes except the generation routes."""

    def __init__(self, tenants: TenantKeys, admin_key: str | None, metrics: GatewayMetrics) -> None:
        """Raises ``InputError`` if the admin key is a tenant's key."""
        tenants.check_admin(admin_key)
        self._tenants = tenants
        self.admin = TenantKeys({admin_key: "admin"}) if admin_key is not None else None
        self._metrics = metrics

    def guard(self, handle: Handler) -> Handler:
        """Wrap a handler so that the client's key is checked before the body is read. Its tenant becomes
        ``request.state.tenant``, which is ``None`` for the admin key."""

        @functools.wraps(handle)
        async def guarded(request: Request) -> Response:
            shown, tenant = request.headers.get("authorization"), None
            try:
                if self.admin is None or self.admin.tenant_of(shown) is None:
                    tenant = self._tenants.tenant_of(shown, request.headers.get("x-api-key"))
                    if tenant is None:
                        challenge = {"WWW-Authenticate": "Bearer"}
                        next_step = "send one of the gateway's keys"
                        self._metrics.refused(INVALID_KEY)
                        raise ApiError(401, "missing or unknown API key", next_step, challenge)
                request.state.tenant = tenant
                response = await handle(request)
            except ApiError as failure:
                response = api_error(request.scope["path"], failure)
            except Exception:
                self._metrics.refused(GATEWAY_FAILED)
                raise
            response.headers.setdefault(GATEWAY, "1")
            return response

        return guarded

    def only_admin(self, request: Request) -> None:
        """Raise ``ApiError`` unless the request may see all tenants' data."""
        if not self.sees_all(request):
            raise ApiError(403, "this shows every tenant's programs", "send the gateway's admin key")

    def sees_all(self, request: Request) -> bool:
        """Whether the request has the admin key, or the gateway no keys at all."""
        return request.state.tenant is None or not (self._tenants.checks or self.admin is not None)


def engine_authorization(request: Request) -> str | None:
    """Return the client's ``Authorization`` header for engines; ``None``: it sent none, or the admin key,
    which engines never receive."""
    return request.headers.get("authorization") if request.state.tenant is not None else None
