"""What engines call programs. An engine knows one program of an id, whoever's it is; so where tenants are
told apart, a program of theirs has its tenant's name before its id there: ``research/agent-1``.

Clients and the gateway itself never see such a name, and engines that serve one tenant neither.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection
from typing import Any
from urllib.parse import quote

import msgspec
from sojourn.ids import MAX_ID_BYTES
from sojourn.wire import MAX_CONTEXT_BYTES

from .known import Key, Shared
from .question import Question, members_of, with_names

MOST_TAG_BYTES = 64
"""Longest tenant's name that is used as it is."""
PROGRAMS = ("program_id", "parent_program_id", "root_program_id")
"""Members of hints, events and engines' answers that name programs."""
ANOTHER = "another"
"""In an engine's answer, in place of a program that is not its asker's."""
MOST_CUT = 50_000
"""Ids remembered that are longer in an engine's name than it may be."""
_NAMING = (*PROGRAMS, "evictor")
_NO_EVENTS = b',"events":[]'
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
        self._cut: Shared[str] = Shared(MOST_CUT)
        """Ids by what is in their place."""
        self._lock = threading.Lock()
        """Large requests are renamed in threads."""

    def of(self, tenant: str, program_id: str) -> str:
        """An engine's name for a program. What is no id, of 1 to ``MAX_ID_BYTES`` bytes, stays as it is."""
        if not self.apart or not 0 < len(_bytes(program_id)) <= MAX_ID_BYTES:
            return program_id
        tag = _tag(tenant)
        name = f"{tag}/{program_id}"
        if len(_bytes(name)) <= MAX_ID_BYTES:
            return name
        cut = _CUT + _digest(program_id)
        with self._lock:
            self._cut.put((tenant, cut), program_id, 1)
        return f"{tag}/{cut}"

    def key(self, name: str) -> Key | None:
        """Whose program an engine means, and its id; ``None``: no tenant's here. A cut one stays cut where it
        has not been asked for lately."""
        if not self.apart:
            return (self._only, name)
        tag, _, program_id = name.partition("/")
        tenant = self._tenants.get(tag)
        if tenant is None or not program_id:
            return None
        with self._lock:
            return (tenant, self._cut.get((tenant, program_id)) or program_id)

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
        else they are taken out. A hint that cannot be read here is not passed on: it might be read there.
        Raises ``BadQuestion``."""
        has_hint = question.context is not None
        if not self.apart or not (has_hint or question.has_bad_hint or question.names_session):
            return body, True
        fits = True

        def change(hint: dict[str, msgspec.Raw]) -> None:
            nonlocal fits
            self._rename(tenant, hint)
            own = members_of(hint["sojourn"]) if bytes(hint.get("sojourn", b"")).startswith(b"{") else {}
            if "events" in own:
                events = msgspec.json.decode(own["events"], type=list[msgspec.Raw])
                own["events"] = _raw([self.event(tenant, raw) for raw in events])
                hint["sojourn"] = _raw(own)
                if len(msgspec.json.encode(hint)) > MAX_CONTEXT_BYTES:
                    fits = False
                    del own["events"]
                    hint["sojourn"] = _raw(own)
            _shorten(hint, own, MAX_CONTEXT_BYTES if fits else MAX_CONTEXT_BYTES - len(_NO_EVENTS))

        return with_names(body, lambda name: self.of(tenant, name), change if has_hint else None), fits

    def answer(self, tenant: str, document: dict[str, Any], *, shows_all: bool = False) -> dict[str, Any]:
        """What an engine told of a program of a tenant, with the ids that this tenant knows.

        Programs of others have no name in it; with ``shows_all`` the engine's.
        """

        def named(name: str) -> str:
            key = self.key(name)
            if key is not None and key[0] == tenant:
                return key[1]
            return name if shows_all else ANOTHER

        def told(value: Any) -> Any:
            if isinstance(value, list):
                return [told(one) for one in value]
            if not isinstance(value, dict):
                return value
            return {
                name: named(one) if name in _NAMING and isinstance(one, str) else told(one)
                for name, one in value.items()
            }

        found: dict[str, Any] = told(document) if self.apart else document
        return found

    def _rename(self, tenant: str, members: dict[str, msgspec.Raw]) -> None:
        for name in PROGRAMS:
            raw = members.get(name)
            if raw is not None and bytes(raw).startswith(b'"'):
                members[name] = _raw(self.of(tenant, msgspec.json.decode(raw, type=str)))


def _shorten(hint: dict[str, msgspec.Raw], own: dict[str, msgspec.Raw], most_bytes: int) -> None:
    """Longer ids may take the room of what else a hint says: it is left out then, the longest first, for
    engines read nothing at all of a hint that is too long. ``own``: the members of its ``sojourn``."""
    while len(msgspec.json.encode(hint)) > most_bytes:
        of_both = [(hint, name) for name in hint.keys() - {*PROGRAMS, "sojourn"}]
        of_both += [(own, name) for name in own.keys() - {"v"}]
        if not of_both:
            return
        members, name = max(of_both, key=lambda one: (len(bytes(one[0][one[1]])), one[1]))
        del members[name]
        if own:
            hint["sojourn"] = _raw(own)


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
