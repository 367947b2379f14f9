"""Checks the API key of a request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


class ApiKeys:
    """API keys that a server accepts in ``Authorization: Bearer KEY``, as in vLLM.

    ``allow`` rejects every request before ``configure``, so a starting server is not open. If ``configure``
    gets no key, every request is allowed, as in vLLM.
    """

    def __init__(self) -> None:
        self._digests: tuple[bytes, ...] | None = None

    def configure(self, keys: Iterable[str]) -> None:
        """Accept only ``keys`` from now on. Empty strings are ignored."""
        self._digests = tuple(_digest(key) for key in keys if key)

    def allow(self, authorization: str | None) -> bool:
        """Return whether a request with this ``Authorization`` header may pass.

        The duration of the check reveals nothing about the keys, because all digests are compared, in
        constant time.
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
