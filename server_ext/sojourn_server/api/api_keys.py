"""API keys of clients: whether a server accepts one, and whose it is."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from sojourn.errors import InputError

DEFAULT_TENANT = "default"
"""The tenant of all requests if no keys are configured."""


class TenantKeys:
    """Tenants by API key. Without keys all clients are one tenant, and engines check their keys."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self._digests = tuple((_digest(key), tenant) for key, tenant in (keys or {}).items())
        self.names: tuple[str, ...] = tuple(sorted({*keys.values()})) if keys else (DEFAULT_TENANT,)

    @property
    def checks(self) -> bool:
        """Whether the gateway checks keys. It does so if any key is configured."""
        return bool(self._digests)

    def check_admin(self, admin_key: str | None) -> None:
        """Raise ``InputError``, whose text contains no key, if the admin key is also a tenant's."""
        whose = self.tenant_of(None, admin_key) if self.checks and admin_key is not None else None
        if whose is not None:
            owner = "the clients'" if self.names == (DEFAULT_TENANT,) else f"{whose}'s"
            raise InputError(f"the admin key is also {owner} key; expected a key that no client has")

    def tenant_of(self, authorization: str | None, api_key: str | None = None) -> str | None:
        """Return the tenant of a client's key; ``None``: unknown. ``authorization``: header ``Authorization``
        (``Bearer KEY``). ``api_key``: header ``X-Api-Key``, which counts without a bearer key."""
        if not self._digests:
            return DEFAULT_TENANT
        scheme, _, token = (authorization or "").partition(" ")
        shown = _digest(token if scheme.lower() == "bearer" else api_key or "")
        found = None  # every key is compared, so that the response time reveals nothing about them
        for digest, tenant in self._digests:
            if hmac.compare_digest(shown, digest):
                found = tenant
        return found


class ApiKeys:
    """API keys that a server accepts in ``Authorization: Bearer KEY``, as in vLLM.

    ``allow`` rejects every request before ``configure``, so a starting server is not open. If ``configure``
    gets no key, every request is allowed, as in vLLM.
    """

    def __init__(self) -> None:
        self._keys: TenantKeys | None = None

    def configure(self, keys: Iterable[str]) -> None:
        """Accept only ``keys`` from now on. Empty strings are ignored."""
        self._keys = TenantKeys({key: DEFAULT_TENANT for key in keys if key})

    def allow(self, authorization: str | None) -> bool:
        """Return whether a request with this ``Authorization`` header may pass."""
        return self._keys is not None and self._keys.tenant_of(authorization) is not None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
