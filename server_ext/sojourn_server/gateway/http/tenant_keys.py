"""API keys and their tenants. The key alone decides which tenant a request counts for."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from sojourn.errors import InputError

from ...policies.toml_document import TomlError, load_toml

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
        shown = _digest(token.strip() if scheme.lower() == "bearer" else api_key or "")
        found = None  # every key is compared, so that the response time reveals nothing about them
        for digest, tenant in self._digests:
            if hmac.compare_digest(shown, digest):
                found = tenant
        return found


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
    table = document.get("tenants")
    if not isinstance(table, dict) or not table:
        raise InputError(f'{path}: no tenants; expected [tenants] with lines NAME = ["KEY", ...]')
    keys: dict[str, str] = {}
    for tenant, listed in table.items():
        listed = [listed] if isinstance(listed, str) else listed
        if not isinstance(listed, list) or not listed or not all(isinstance(key, str) for key in listed):
            raise InputError(f"{path}: the keys of {tenant} are not a list of texts")
        for key in listed:
            name = key.removeprefix("env:") if key.startswith("env:") else None
            value = environment.get(name, "") if name is not None else key
            if not value or value != value.strip():
                why = f"the environment has no {name}" if name and not value else "it has spaces or is empty"
                raise InputError(f"{path}: a key of {tenant} cannot be used: {why}")
            if keys.setdefault(value, tenant) != tenant:
                raise InputError(f"{path}: {keys[value]} and {tenant} have the same key; expected one each")
    return TenantKeys(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
