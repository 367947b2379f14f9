"""What engines call programs. An engine knows one program of an id, whoever's it is; so where tenants are
told apart, a program of theirs has its tenant's name before its id there: ``research/agent-1``.

Clients and the gateway itself never see such a name, and engines that serve one tenant neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any
from urllib.parse import quote

import msgspec
from sojourn.ids import MAX_ID_BYTES
from sojourn.wire import MAX_CONTEXT_BYTES

from .known import Key
from .question import Question, with_hint, without_identity

MOST_TAG_BYTES = 64
"""Longest tenant's name that is used as it is."""
PROGRAMS = ("program_id", "parent_program_id", "root_program_id")
"""Members of hints, events and engines' answers that name programs."""
_CUT = "#"
"""Before a digest in place of what is too long; a quoted name has none."""
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class EngineNames:
    """Of the programs of these tenants. Of one tenant alone they are the ids that its clients chose."""

    def __init__(self, tenants: Collection[str]) -> None:
        self.apart = len(tenants) > 1
        """Tenants are told apart."""
        self._only = next(iter(tenants), "")
        self._tenants = {_tag(tenant): tenant for tenant in tenants}

    def of(self, tenant: str, program_id: str) -> str:
        """An engine's name for a program. What is no id, of 1 to ``MAX_ID_BYTES`` bytes, stays as it is."""
        if not self.apart or not 0 < len(_bytes(program_id)) <= MAX_ID_BYTES:
            return program_id
        tag = _tag(tenant)
        name = f"{tag}/{program_id}"
        return name if len(_bytes(name)) <= MAX_ID_BYTES else f"{tag}/{_CUT}{_digest(program_id)}"

    def key(self, name: str) -> Key | None:
        """Whose program an engine means, and its id; ``None``: no tenant's here. A cut one stays cut."""
        if not self.apart:
            return (self._only, name)
        tag, _, program_id = name.partition("/")
        tenant = self._tenants.get(tag)
        return (tenant, program_id) if tenant is not None and program_id else None

    def event(self, tenant: str, raw: msgspec.Raw) -> msgspec.Raw:
        """The same event as an engine gets it; what is none stays as it is."""
        if not self.apart:
            return raw
        try:
            event = _members.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return raw
        self._rename(tenant, event)
        return msgspec.Raw(msgspec.json.encode(event))

    def request(self, tenant: str, body: bytes, question: Question) -> tuple[bytes, bool]:
        """A request's body as an engine gets it, and whether the events in its hint still have room there;
        else they are taken out. A hint that cannot be read here is not passed on: it might be read there."""
        if not self.apart or not (question.has_bad_hint or question.context is not None):
            return body, True
        if question.context is None:
            return without_identity(body), True
        fits = True

        def change(hint: dict[str, msgspec.Raw]) -> None:
            nonlocal fits
            self._rename(tenant, hint)
            own = _members.decode(hint["sojourn"]) if bytes(hint.get("sojourn", b"")).startswith(b"{") else {}
            if "events" not in own:
                return
            events = msgspec.json.decode(own["events"], type=list[msgspec.Raw])
            own["events"] = _raw([self.event(tenant, raw) for raw in events])
            hint["sojourn"] = _raw(own)
            if len(msgspec.json.encode(hint)) > MAX_CONTEXT_BYTES:
                fits = False
                del own["events"]
                hint["sojourn"] = _raw(own)

        return with_hint(body, change), fits

    def answer(self, tenant: str, document: dict[str, Any]) -> dict[str, Any]:
        """What an engine told of a program of a tenant, with the ids that this tenant knows."""
        found = dict(document)
        for name in PROGRAMS:
            key = self.key(text) if isinstance(text := found.get(name), str) else None
            if key is not None and key[0] == tenant:
                found[name] = key[1]
        return found

    def _rename(self, tenant: str, members: dict[str, msgspec.Raw]) -> None:
        for name in PROGRAMS:
            raw = members.get(name)
            if raw is not None and bytes(raw).startswith(b'"'):
                members[name] = _raw(self.of(tenant, msgspec.json.decode(raw, type=str)))


def _tag(tenant: str) -> str:
    """One for each tenant, without a slash."""
    quoted = quote(tenant, safe="", errors="replace")
    return quoted if len(quoted) <= MOST_TAG_BYTES else _CUT + _digest(tenant)


def _digest(text: str) -> str:
    return hashlib.sha256(_bytes(text)).hexdigest()[:32]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
