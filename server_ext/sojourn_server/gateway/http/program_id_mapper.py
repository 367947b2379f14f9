"""Maps clients' program ids to the names that engines use for programs.

Engines do not separate tenants. So of several tenants, an engine's name for a program starts with the
tenant, as in ``research/agent-1``. Clients and the gateway use only ids. "id" is the client's, "name" the
engine's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import secrets
from collections.abc import Collection
from typing import Any
from urllib.parse import quote

import msgspec
from sojourn.ids import MAX_ID_BYTES
from sojourn.wire_codec import WireError, decode_event, encode
from sojourn.wire_events import AnyEvent

from ...metrics.turn_explanation import Explanation
from .generation_request import GenerationRequest, Members, encode_raw, members_of, with_identity

Key = tuple[str, str]
"""Tenant and program id."""
PROGRAM_ID_FIELDS = ("program_id", "parent_program_id", "root_program_id")
"""Fields of hints, events and engines' answers that name programs."""
FOREIGN_PROGRAM_ID = "another"
"""Text that replaces the name of another tenant's program in an engine's answer."""


class ProgramIdMapper:
    """Maps ids to names and back, for the given tenants."""

    def __init__(self, tenants: Collection[str]) -> None:
        self.only_tenant = next(iter(tenants), "") if len(tenants) <= 1 else None
        """The only tenant; ``None``: there are several."""
        self._tenants = {_tag(tenant): tenant for tenant in tenants}

    def engine_name(self, tenant: str, program_id: str) -> str:
        """Return the engine's name for a program. If it were longer than ``MAX_ID_BYTES``, it has a digest of
        the id, which is not mapped back. An id that is empty or too long is unchanged: engines refuse it."""
        if self.only_tenant is not None or not 0 < len(_bytes(program_id)) <= MAX_ID_BYTES:
            return program_id
        name = f"{_tag(tenant)}/{program_id}"
        return name if len(_bytes(name)) <= MAX_ID_BYTES else f"{_tag(tenant)}/#{_digest(program_id)}"

    def key(self, name: str) -> Key | None:
        """Return the key of an engine's name of a program; ``None``: no tenant here has such a name."""
        if self.only_tenant is not None:
            return (self.only_tenant, name)
        tag, _, program_id = name.partition("/")
        tenant = self._tenants.get(tag)
        return (tenant, program_id) if tenant is not None and program_id else None

    def named(self, tenant: str, event: AnyEvent) -> AnyEvent:
        """Return an event with its program ids replaced by the engines' names."""
        if self.only_tenant is not None:
            return event
        fields: dict[str, Any] = {
            name: self.engine_name(tenant, program_id)
            for name in PROGRAM_ID_FIELDS
            if (program_id := getattr(event, name, None)) is not None
        }
        if hasattr(event, "tenant"):
            fields["tenant"] = _tag(tenant)  # engines divide leases among these tenants
        return msgspec.structs.replace(event, **fields)

    def request(self, tenant: str, body: bytes, question: GenerationRequest) -> bytes:
        """Return a body of one of several tenants, with the engines' names of programs and an id of ours for
        an answer that is stored. A hint that cannot be read is removed, because an engine might read ids in
        it. Raises ``InvalidGenerationRequest``."""

        def change(hint: Members) -> None:
            for name in PROGRAM_ID_FIELDS:
                if bytes(hint.get(name, b"")).startswith(b'"'):
                    hint[name] = encode_raw(self.engine_name(tenant, msgspec.json.decode(hint[name])))
            own = members_of(hint["sojourn"]) if bytes(hint.get("sojourn", b"")).startswith(b"{") else {}
            own = {"v": msgspec.Raw(b"1"), **own, "tenant": encode_raw(_tag(tenant))}
            if "events" in own:
                own["events"] = encode_raw(self._named_events(tenant, own["events"]))
            hint["sojourn"] = encode_raw(own)

        rename = functools.partial(self.engine_name, tenant)
        request_id = self.response_prefix(tenant) + secrets.token_hex(12) if question.is_stored else None
        return with_identity(body, rename, change if question.context is not None else None, request_id)

    def response_prefix(self, tenant: str) -> str:
        """Return the beginning of the ids of a tenant's stored answers, of several tenants. No client chooses
        these ids, so any gateway can tell by the id whose answer it is."""
        return f"resp_{_digest(tenant)}" if self.only_tenant is None else ""

    def _named_events(self, tenant: str, events: msgspec.Raw) -> list[AnyEvent]:
        """Return the events of a hint with the engines' names, without those that cannot be read."""
        named: list[AnyEvent] = []
        for raw in msgspec.json.decode(events, type=list[msgspec.Raw]) if bytes(events)[:1] == b"[" else ():
            with contextlib.suppress(WireError):
                event = self.named(tenant, decode_event(raw))
                encode(event)
                named.append(event)
        return named

    def answer(self, tenant: str, document: dict[str, Any], *, shows_all: bool = False) -> dict[str, Any]:
        """Return an engine's answer about a tenant's program with the tenant's ids. Names of other tenants'
        programs become ``FOREIGN_PROGRAM_ID``; with ``shows_all`` they stay."""

        def named(name: str) -> str:
            key = self.key(name)
            if key is not None and key[0] == tenant:
                return key[1]
            return name if shows_all else FOREIGN_PROGRAM_ID

        def renamed(value: Any) -> Any:
            if isinstance(value, list):
                return [renamed(one) for one in value]
            if not isinstance(value, dict):
                return value
            fields = (*PROGRAM_ID_FIELDS, "evictor")
            return {
                name: named(one) if name in fields and isinstance(one, str) else renamed(one)
                for name, one in value.items()
            }

        found: dict[str, Any] = document if self.only_tenant is not None else renamed(document)
        return found

    def explanation(
        self, tenant: str, found: Explanation, replica: str | None, *, shows_all: bool
    ) -> Explanation:
        """Return an engine's explanation of a turn as ``answer`` does, with ids in the text too. ``replica``:
        id of the replica that explains; ``None``: unknown."""
        document = {"program_id": found.program_id, "evictor": found.lost_to, "decisions": found.decisions}
        named = self.answer(tenant, document, shows_all=shows_all)
        text, lost_to = found.text, named.pop("evictor")
        if found.lost_to is not None and lost_to != found.lost_to:
            by = "another program" if lost_to == FOREIGN_PROGRAM_ID else f"program {lost_to}"
            text = text.replace(f"by program {found.lost_to}", f"by {by}")
        return msgspec.structs.replace(found, **named, lost_to=lost_to, text=text, replica=replica)


@functools.lru_cache(maxsize=1024)
def _tag(tenant: str) -> str:
    """Return the prefix of the engines' names for a tenant's programs, without a slash."""
    quoted = quote(tenant, safe="", errors="replace")
    return quoted if len(quoted) <= 64 else "#" + _digest(tenant)


def _digest(text: str) -> str:
    return hashlib.sha256(_bytes(text)).hexdigest()[:32]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
