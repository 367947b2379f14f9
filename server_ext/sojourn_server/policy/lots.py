"""Draws that depend on what is drawn for and on nothing else: the same again whenever they are asked for."""

from __future__ import annotations

from hashlib import blake2b


def lot(seed: int, what: str, many: int) -> int:
    """One of ``many``, each as likely, from 0 on; independent for any two ``what``."""
    digest = blake2b(f"{seed}/{what}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % many
