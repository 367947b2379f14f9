"""Ids as HTTP headers, the one place that every server's frontend reads alike."""

from __future__ import annotations

from urllib.parse import quote

SESSION_HEADER = "X-Session-ID"
"""vLLM ≥ 0.32 carries it to ``request.session_id``; several routers key affinity on it."""

_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F))


def header_text(id: str) -> str:
    """``id`` as a header's value. What HTTP cannot carry there is percent-encoded as UTF-8.

    A plain id (visible ASCII) appears unchanged; in an encoded one ``%`` is encoded as well.
    """
    if id.isascii() and id.isprintable() and " " not in id:
        return id
    return quote(id, safe=_VISIBLE.replace("%", ""), errors="replace")


def session_header(program_id: str) -> dict[str, str]:
    """``X-Session-ID``."""
    return {SESSION_HEADER: header_text(program_id)}
