"""Keys of a gateway's clients: the file of tenants, and who may use the routes that show its state. The key
alone decides which tenant a request counts for."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
from sojourn.errors import InputError
from starlette.requests import Request
from starlette.responses import Response

from ...api.api_errors import ApiError
from ...api.api_keys import DEFAULT_TENANT as DEFAULT_TENANT
from ...api.api_keys import TenantKeys as TenantKeys
from ...policies.toml_document import TomlError, load_toml
from .client_apis import GATEWAY, GATEWAY_FAILED, INVALID_KEY, api_error
from .gateway_metrics import GatewayMetrics

Handler = Callable[[Request], Awaitable[Response]]


def load_tenant_keys(
    path: Path | None, key: str | None = None, environment: Mapping[str, str] = os.environ
) -> TenantKeys:
    """Read a tenants file. ``env:VARIABLE`` stands for the value of an environment variable. Without a file,
    ``key`` is the key of all clients, if any. Raises ``InputError``, whose text contains no key."""
    if path is None:
        return TenantKeys({key: DEFAULT_TENANT} if key else None)
    try:
        document = load_toml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except TomlError as error:
        raise InputError(f"{path}: {error}") from None
    expected = 'expected [tenants] with lines NAME = ["KEY", ...]'
    table, keys = document.get("tenants"), dict[str, str]()
    for tenant, listed in table.items() if isinstance(table, dict) else ():
        try:
            listed = msgspec.convert([listed] if isinstance(listed, str) else listed, list[str])
        except msgspec.ValidationError as error:
            raise InputError(f"{path}: the keys of {tenant}: {error}; {expected}") from None
        for key in listed or [""]:
            name = key.removeprefix("env:") if key.startswith("env:") else None
            value = environment.get(name, "") if name is not None else key
            if not value or value != value.strip():
                why = f"the environment has no {name}" if name and not value else "it has spaces or is empty"
                raise InputError(f"{path}: a key of {tenant} cannot be used: {why}")
            if keys.setdefault(value, tenant) != tenant:
                raise InputError(f"{path}: {keys[value]} and {tenant} have the same key; expected one each")
    if not keys:
        raise InputError(f"{path}: no tenants; {expected}")
    return TenantKeys(keys)


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
