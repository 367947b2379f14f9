"""Checks the API key of a request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


class ApiKeys:
    """Keys that a server accepts in ``Authorization: Bearer KEY``, as in vLLM.

    Before ``configure`` every request is rejected, so a starting server is not open. As in vLLM, no
    configured key means no check.
    """

    def __init__(self) -> None:
        self._digests: tuple[bytes, ...] | None = None

    def configure(self, keys: Iterable[str]) -> None:
        """Accept ``keys``; empty strings are ignored."""
        self._digests = tuple(_digest(key) for key in keys if key)

    def allow(self, authorization: str | None) -> bool:
        """Whether a request with this ``Authorization`` header may pass.

        The time this takes reveals nothing about the keys: digests of equal length are compared in constant
        time, and always all of them.
        """
        if self._digests is None:
            return False
        if not self._digests:
            return True
        scheme, _, token = (authorization or "").partition(" ")
        shown = _digest(token)
        matched = False
        for digest in self._digests:
            matched |= hmac.compare_digest(shown, digest)
        return matched and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
