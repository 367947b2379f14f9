"""Maps clients' program ids to the names that engines use for programs.

Engines do not separate tenants. So with several tenants, an engine's name for a program starts with the
tenant, as in ``research/agent-1``. With one tenant, names and ids are equal. Clients and the gateway itself
use only ids. In this module, "id" is the client's, "name" the engine's.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection
from typing import Any
from urllib.parse import quote

import msgspec
from sojourn.ids import MAX_ID_BYTES
from sojourn.wire_codec import MAX_CONTEXT_BYTES, WireError, decode_event, encode

from ...metrics.turn_explanation import Explanation
from ...routing.bounded_program_table import Key
from .client_json import encode_raw, members_of
from .generation_request import GenerationRequest, with_names
from .program_event_records import TenantBoundedCache

MOST_TAG_BYTES = 64
"""Maximum bytes of a percent-encoded tenant in a name. The digest of a longer tenant takes its place."""
PROGRAM_ID_FIELDS = ("program_id", "parent_program_id", "root_program_id")
"""Fields of hints, events and engines' answers that name programs."""
FOREIGN_PROGRAM_ID = "another"
"""Text that replaces the name of another tenant's program in an engine's answer."""
MAX_SHORTENED_IDS = 50_000
"""Maximum number of long ids that are remembered. An engine's name has a digest in place of a long id."""
_ID_FIELDS = (*PROGRAM_ID_FIELDS, "evictor")
"""Fields of engines' answers whose values are names of programs."""
_NO_EVENTS = b',"events":[]'
_HASH_MARK = "#"
"""First character of a digest that replaces a long id or tenant. A percent-encoded tenant does not contain
it."""


class ProgramIdMapper:
    """Maps ids to names and back, for the given tenants."""

    def __init__(self, tenants: Collection[str]) -> None:
        self.prefixes_tenant = len(tenants) > 1
        """Whether names start with the tenant."""
        self.only_tenant = None if self.prefixes_tenant else next(iter(tenants), "")
        """The only tenant; ``None``: there are several."""
        self._tenants = {_tag(tenant): tenant for tenant in tenants}
        self._long_ids: TenantBoundedCache[str] = TenantBoundedCache(MAX_SHORTENED_IDS)
        """Long ids, by tenant and by the digest that replaces the id."""
        self._lock = threading.Lock()
        """Held while ``_long_ids`` is used, because large requests are processed in threads."""

    def engine_name(self, tenant: str, program_id: str) -> str:
        """Return the engine's name for a program. A name longer than ``MAX_ID_BYTES`` has a digest in place
        of the id. An invalid id (empty, or longer than ``MAX_ID_BYTES``) is returned unchanged."""
        if not self.prefixes_tenant or not 0 < len(_bytes(program_id)) <= MAX_ID_BYTES:
            return program_id
        tag = _tag(tenant)
        name = f"{tag}/{program_id}"
        if len(_bytes(name)) <= MAX_ID_BYTES:
            return name
        short_id = _HASH_MARK + _digest(program_id)
        with self._lock:
            self._long_ids.put((tenant, short_id), program_id, 1)
        return f"{tag}/{short_id}"

    def key(self, name: str) -> Key | None:
        """Return (tenant, program id) for an engine's name of a program. ``None``: no tenant of this gateway
        has such a name.

        The name of a program with a long id contains a digest of the id. If the mapper no longer remembers
        the id, the result contains the digest.
        """
        if self.only_tenant is not None:
            return (self.only_tenant, name)
        tag, _, program_id = name.partition("/")
        tenant = self._tenants.get(tag)
        if tenant is None or not program_id:
            return None
        with self._lock:
            return (tenant, self._long_ids.get((tenant, program_id)) or program_id)

    def event(self, tenant: str, raw: msgspec.Raw) -> msgspec.Raw | None:
        """Return an encoded event with its program ids replaced by the engines' names; ``None``: the event
        cannot be read.

        With several tenants, unknown fields are removed, because they might contain program ids.
        """
        if not self.prefixes_tenant:
            return raw
        try:
            event = decode_event(raw)
            fields = {
                name: self.engine_name(tenant, program_id)
                for name in PROGRAM_ID_FIELDS
                if (program_id := getattr(event, name, None)) is not None
            }
            if hasattr(event, "tenant"):
                fields["tenant"] = _tag(tenant)  # engines divide leases among these tenants
            return msgspec.Raw(encode(msgspec.structs.replace(event, **fields)))
        except WireError:
            return None

    def request(self, tenant: str, body: bytes, question: GenerationRequest) -> tuple[bytes, bool]:
        """Return (body with the engines' names for programs, whether its hint still has all events).

        If the names make the hint too long, the hint loses its events. If the hint cannot be read, it is
        removed, because an engine might read ids in it that were not replaced. Raises
        ``InvalidGenerationRequest``.
        """
        has_hint = question.context is not None
        if not self.prefixes_tenant or not (has_hint or question.has_bad_hint or question.names_session):
            return body, True
        fits = True

        def change(hint: dict[str, msgspec.Raw]) -> None:
            nonlocal fits
            self._rename(tenant, hint)
            own = members_of(hint["sojourn"]) if bytes(hint.get("sojourn", b"")).startswith(b"{") else {}
            own = {"v": msgspec.Raw(b"1"), **own, "tenant": encode_raw(_tag(tenant))}
            if not bytes(own.get("events", b"[")).startswith(b"["):
                del own["events"]  # an invalid field, which engines would leave out too
            hint["sojourn"] = encode_raw(own)
            if "events" in own:
                events = msgspec.json.decode(own["events"], type=list[msgspec.Raw])
                named = [self.event(tenant, raw) for raw in events]
                own["events"] = encode_raw([event for event in named if event is not None])
                hint["sojourn"] = encode_raw(own)
                if len(msgspec.json.encode(hint)) > MAX_CONTEXT_BYTES:
                    fits = False
                    del own["events"]
                    hint["sojourn"] = encode_raw(own)
            _shorten(hint, own, MAX_CONTEXT_BYTES if fits else MAX_CONTEXT_BYTES - len(_NO_EVENTS))

        return with_names(
            body, lambda name: self.engine_name(tenant, name), change if has_hint else None
        ), fits

    def answer(self, tenant: str, document: dict[str, Any], *, shows_all: bool = False) -> dict[str, Any]:
        """Return an engine's answer about a tenant's program, with the engines' names replaced by the
        tenant's ids.

        Names of other tenants' programs become ``FOREIGN_PROGRAM_ID``. With ``shows_all`` they stay
        unchanged.
        """

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
            return {
                name: named(one) if name in _ID_FIELDS and isinstance(one, str) else renamed(one)
                for name, one in value.items()
            }

        found: dict[str, Any] = renamed(document) if self.prefixes_tenant else document
        return found

    def explanation(
        self, tenant: str, found: Explanation, replica: str | None, *, shows_all: bool
    ) -> Explanation:
        """Return an engine's explanation of a turn, with the engine's names replaced by the tenant's ids, in
        the text too.

        Names of other tenants' programs become ``FOREIGN_PROGRAM_ID``. With ``shows_all`` they stay
        unchanged. ``replica``: id of the replica that explains; ``None``: unknown.
        """
        named = self.answer(
            tenant, {"program_id": found.program_id, "evictor": found.lost_to}, shows_all=shows_all
        )
        text, lost_to = found.text, named["evictor"]
        if found.lost_to is not None and lost_to != found.lost_to:
            by = "another program" if lost_to == FOREIGN_PROGRAM_ID else f"program {lost_to}"
            text = text.replace(f"by program {found.lost_to}", f"by {by}")
        decisions = [self.answer(tenant, one, shows_all=shows_all) for one in found.decisions]
        return msgspec.structs.replace(
            found,
            program_id=named["program_id"],
            lost_to=lost_to,
            text=text,
            decisions=decisions,
            replica=replica,
        )

    def _rename(self, tenant: str, members: dict[str, msgspec.Raw]) -> None:
        """Replace the program ids in a hint's fields by the engines' names, in place."""
        for name in PROGRAM_ID_FIELDS:
            raw = members.get(name)
            if raw is not None and bytes(raw).startswith(b'"'):
                members[name] = encode_raw(self.engine_name(tenant, msgspec.json.decode(raw, type=str)))


def _shorten(hint: dict[str, msgspec.Raw], own: dict[str, msgspec.Raw], most_bytes: int) -> None:
    """Shorten a hint to ``most_bytes``, in place: remove its longest fields, but no program ids. The engines'
    names may have made the hint too long, and engines ignore such a hint.

    ``own``: the fields of the hint's ``sojourn`` part.
    """
    while len(msgspec.json.encode(hint)) > most_bytes:
        of_both = [(hint, name) for name in hint.keys() - {*PROGRAM_ID_FIELDS, "sojourn"}]
        of_both += [(own, name) for name in own.keys() - {"v"}]
        if not of_both:
            return
        members, name = max(of_both, key=lambda one: (len(bytes(one[0][one[1]])), one[1]))
        del members[name]
        if own:
            hint["sojourn"] = encode_raw(own)


def _tag(tenant: str) -> str:
    """Return the prefix of the engines' names for a tenant's programs. Each tenant has its own prefix,
    without a slash."""
    quoted = quote(tenant, safe="", errors="replace")
    return quoted if len(quoted) <= MOST_TAG_BYTES else _HASH_MARK + _digest(tenant)


def _digest(text: str) -> str:
    """Return the first 32 hexadecimal digits of the SHA-256 digest."""
    return hashlib.sha256(_bytes(text)).hexdigest()[:32]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
