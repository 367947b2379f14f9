"""The API key check of our routes; vLLM's own covers only paths it knows."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


class ApiKeys:
    """The keys a server accepts, as vLLM reads them: ``Authorization: Bearer KEY``, any one of several.

    Until ``configure`` was called nobody is let in, so that a server which is still
    starting is not an open one. No keys configured means no check, as in vLLM.
    """

    def __init__(self) -> None:
        self._digests: tuple[bytes, ...] | None = None

    def configure(self, keys: Iterable[str]) -> None:
        """Accept ``keys``; empty strings do not count as keys."""
        self._digests = tuple(_digest(key) for key in keys if key)

    def allow(self, authorization: str | None) -> bool:
        """Whether a request with this ``Authorization`` header may pass.

        The time it takes tells nothing about the keys: digests of equal length are
        compared in constant time, and all of them, whichever matches.
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
