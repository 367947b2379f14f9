"""Which program a request belongs to, by the headers and body fields that agent clients send.

Precedence, first match: the hint (``agentic_context``) and ``session_id`` of the body, which the caller
reads; ``X-Session-ID``; the operator's own header (``--session-header``); the other rows of ``HEADER_ROWS``
in their order; then the body fields ``vllm_xargs.session_id``, ``metadata.user_id`` and ``prompt_cache_key``.
Parent, root and agent type come from the row that names the program.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from sojourn.dialects import header_text
from sojourn.ids import MAX_ID_BYTES, id_problem

from ..core.request_hints import clipped

SESSION_HEADER = "x-session-id"
PARENT_HEADER = "x-parent-session-id"
ROOT_HEADER = "x-root-session-id"
AGENT_TYPE_HEADER = "x-sojourn-agent-type"
"""Headers of our own, in lower case. A gateway sends them to engines, with the engines' program names."""


class HeaderRow(NamedTuple):
    """The headers, in lower case, with which a client names a program. An empty name: the client sends no
    such header."""

    clients: str
    """Clients that send the row, for docs."""
    program: str
    parent: str = ""
    root: str = ""
    agent_type: str = ""
    agent: str = ""
    """Id of a sub-agent, unique within ``program`` only. Its program is ``PROGRAM/AGENT``, and its parent
    ``PROGRAM``."""


HEADER_ROWS = (
    HeaderRow(
        "OpenCode, gateways", SESSION_HEADER, PARENT_HEADER, root=ROOT_HEADER, agent_type=AGENT_TYPE_HEADER
    ),
    HeaderRow("Claude Code", "x-claude-code-session-id", agent="x-claude-code-agent-id"),
    HeaderRow(
        "Codex", "thread-id", "x-codex-parent-thread-id", root="session-id", agent_type="x-openai-subagent"
    ),
    HeaderRow("Codex before 0.100", "conversation_id", root="session_id"),
    HeaderRow("routers with sticky sessions", "x-session-affinity", PARENT_HEADER),
)
_ID_OF_ONE_SESSION = re.compile(
    r"(?<![0-9a-z])([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{13,}|(?=[a-z]*\d)[0-9a-z]{26})(?![0-9a-z])",
    re.ASCII | re.IGNORECASE,
)
"""A UUID, a time in milliseconds, or 26 letters and digits (ULID, OpenCode). A ``prompt_cache_key`` without
one is the same for all requests of an application, which would become one program."""
SESSION_PATH = "/sojourn/session/"
"""Beginning of a base URL that names a program, for clients that send no id: ``/sojourn/session/ID/v1``."""


class ClientIdentity(NamedTuple):
    """Program of a request, as its client names it. Every id is valid on the wire."""

    program_id: str
    parent_id: str | None = None
    root_id: str | None = None
    agent_type: str | None = None


def identify(
    headers: Mapping[str, str],
    session_header: str | None = None,
    user_id: object = None,
    prompt_cache_key: object = None,
    xargs_session_id: object = None,
) -> ClientIdentity | None:
    """Return the program that a client's headers or body fields name; ``None`` if they name none.

    ``headers``: with lower-case names. ``session_header``: name of the operator's own header.
    ``user_id``: ``metadata.user_id`` of the body. ``prompt_cache_key``: that of the body.
    ``xargs_session_id``: ``vllm_xargs.session_id`` of the body. Never raises.
    """
    own = [HeaderRow("operator", session_header.lower(), PARENT_HEADER)] if session_header else []
    for row in (HEADER_ROWS[0], *own, *HEADER_ROWS[1:]):  # a gateway sends the first
        session = wire_id(headers.get(row.program))
        if session is None:
            continue
        agent = headers.get(row.agent)
        program = wire_id(f"{session}/{agent}") if agent else session
        parent = session if agent else wire_id(headers.get(row.parent))
        root = wire_id(headers.get(row.root)) or (session if agent else None)
        return ClientIdentity(
            program or session,
            parent if parent != program else None,
            root if root != program else None,
            clipped(headers.get(row.agent_type)),
        )
    named = wire_id(xargs_session_id) or _session_of_user_id(user_id)
    if named is None and isinstance(prompt_cache_key, str) and _ID_OF_ONE_SESSION.search(prompt_cache_key):
        named = wire_id(prompt_cache_key)
    return ClientIdentity(named) if named is not None else None


def split_session_path(scope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an ASGI scope whose path names a program with the path behind it, which begins with ``/v1/``,
    and the program in ``X-Session-ID``. ``None``: the path names none, or an id that the wire does not take.

    The id is percent-encoded in the path, so ``%2F`` is part of it. A server must check the API key itself
    for such a path, since vLLM checks paths that begin with ``/v1``.
    """
    root = scope.get("root_path", "")
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    path = raw.decode("latin-1").removeprefix(root)
    encoded, mark, rest = path.removeprefix(SESSION_PATH).partition("/v1/")
    program = wire_id(unquote(encoded))
    if not path.startswith(SESSION_PATH) or not mark or "/" in encoded or program is None:
        return None
    path = f"{root}/v1/{rest}"
    there = {**scope, "path": unquote(path), "raw_path": path.encode("latin-1")}
    return with_session(there, program)


def with_session(scope: Mapping[str, Any], program_id: str) -> dict[str, Any]:
    """Return an ASGI scope with ``program_id`` in ``X-Session-ID``, percent-encoded if no header holds it."""
    try:
        value = program_id.encode("latin-1")  # as Starlette reads headers
    except UnicodeEncodeError:
        value = (wire_id(header_text(program_id)) or "").encode()
    name = SESSION_HEADER.encode()
    others = [header for header in scope["headers"] if header[0] != name]
    return {**scope, "headers": [*others, (name, value)]}


def wire_id(value: object) -> str | None:
    """Return ``value`` as an id that the wire takes: an id that is too long is replaced by its digest.
    ``None``: it is no text, is empty, or has control characters."""
    if not isinstance(value, str) or not value:
        return None
    data = value.encode("utf-8", "replace")
    if len(data) > MAX_ID_BYTES:
        return "sha256-" + hashlib.sha256(data).hexdigest()
    return value if id_problem(value) is None else None


def _session_of_user_id(user_id: object) -> str | None:
    """Return the session in ``metadata.user_id``: Anthropic's clients send a JSON object there, or
    ``user_…_session_ID``. Any other user id names a person, not a program."""
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{"):
        try:
            found = json.loads(user_id)
        except (ValueError, RecursionError):
            return None
        return wire_id(found.get("session_id"))
    _, mark, session = user_id.rpartition("_session_")
    return wire_id(session) if mark else None
