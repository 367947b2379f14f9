"""The one header that every dialect so far sends."""

from __future__ import annotations

from urllib.parse import quote

SESSION_HEADER = "X-Session-ID"
"""vLLM ≥ 0.32 carries it to ``request.session_id``; several routers key affinity on it."""

_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F))


def session_header(program_id: str) -> dict[str, str]:
    """``X-Session-ID``. What HTTP cannot carry in a header is percent-encoded as UTF-8.

    A plain id (visible ASCII without ``%``) appears unchanged.
    """
    if program_id.isascii() and program_id.isprintable() and " " not in program_id:
        return {SESSION_HEADER: program_id}
    return {SESSION_HEADER: quote(program_id, safe=_VISIBLE.replace("%", ""), errors="replace")}
