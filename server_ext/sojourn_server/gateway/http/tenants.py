"""Who is charged: the tenant of the key that a request came with, never what its body says."""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EVERYBODY = "default"
"""The tenant of all where no keys are told apart."""


class TenantsError(ValueError):
    """A file of tenants cannot be used; the text names what was wrong and what was expected."""


class Tenants:
    """Keys and whose they are. Without keys everybody is let in, as one tenant, and the engines check."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        """``keys``: key → tenant."""
        self._digests = tuple((_digest(key), tenant) for key, tenant in (keys or {}).items())
        self.names: tuple[str, ...] = tuple(sorted({*keys.values()})) if keys else (EVERYBODY,)

    @property
    def checks(self) -> bool:
        """Keys are told apart here."""
        return bool(self._digests)

    def check_admin(self, admin_key: str | None) -> None:
        """Nobody who generates is to drain replicas. Raises ``TenantsError``, which repeats no key."""
        whose = self.of(None, admin_key) if self.checks and admin_key is not None else None
        if whose is not None:
            of = "everybody's" if self.names == (EVERYBODY,) else f"{whose}'s"
            raise TenantsError(f"the admin key is {of} too; expected one that is nobody else's")

    def of(self, authorization: str | None, api_key: str | None = None) -> str | None:
        """Whose request it is, by ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``; ``None``: no key
        that is known.

        The time it takes tells nothing about the keys: all are compared, whichever fits.
        """
        if not self._digests:
            return EVERYBODY
        scheme, _, token = (authorization or "").partition(" ")
        shown = _digest(token.strip() if scheme.lower() == "bearer" else api_key or "")
        found = None
        for digest, tenant in self._digests:
            if hmac.compare_digest(shown, digest):
                found = tenant
        return found


def read_tenants(path: Path, environment: Mapping[str, str] = os.environ) -> Tenants:
    """From TOML: ``[tenants]`` and under it ``NAME = ["KEY", ...]``; ``env:VARIABLE`` stands for its value.

    Raises ``TenantsError``, which repeats no key.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TenantsError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise TenantsError(f"{path}: not TOML: {error}") from None
    table = document.get("tenants")
    if not isinstance(table, dict) or not table:
        raise TenantsError(f'{path}: no tenants; expected a table [tenants] with lines NAME = ["KEY", ...]')
    keys: dict[str, str] = {}
    for tenant, listed in table.items():
        for key in _keys(path, tenant, [listed] if isinstance(listed, str) else listed, environment):
            if keys.setdefault(key, tenant) != tenant:
                raise TenantsError(f"{path}: {keys[key]} and {tenant} have the same key; expected one each")
    return Tenants(keys)


def _keys(path: Path, tenant: str, listed: object, environment: Mapping[str, str]) -> Iterable[str]:
    if not isinstance(listed, Sequence) or not listed or not all(isinstance(key, str) for key in listed):
        raise TenantsError(f"{path}: the keys of {tenant} are no list of texts")
    for key in listed:
        name = key[len("env:") :] if key.startswith("env:") else None
        value = environment.get(name, "") if name is not None else key
        if not value or value != value.strip():
            where = (
                f"the environment has no {name}"
                if name is not None and not value
                else "one has spaces or is empty"
            )
            raise TenantsError(f"{path}: a key of {tenant} cannot be used: {where}")
        yield value


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
