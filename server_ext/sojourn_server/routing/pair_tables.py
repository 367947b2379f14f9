"""Records of a pair core: engines, programs and requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .bounded_program_table import Key
from .routing_events import PairEngineRegistered, PairRole, RequestReceived, SendRequestToPair
from .routing_status import PairEngineStatus, ProgramRouteStatus


@dataclass(slots=True)
class PairEngine:
    """A prefill or decode engine."""

    seen: PairEngineRegistered
    """The engine's last registration or report."""
    heard_s: float
    """Time of the last registration or report, on the core's clock."""
    number: int | None = None
    """The engine's number in the pair scheduler; ``None``: the scheduler does not have the engine. Each
    restart of the engine gets a new number."""
    is_open: bool = False
    """Whether new requests may be sent to the engine."""
    is_draining: bool = False
    """Whether the engine gets no new requests because it drains."""
    suspect: bool = False
    """Whether the engine failed at a request or was silent for too long, and has not reported since."""
    probed_s: float | None = None
    """Time of the last probe since the last report; ``None``: there was none."""

    @property
    def replica_id(self) -> str:
        """Id of the engine as a replica."""
        return self.seen.replica_id

    @property
    def instance(self) -> str:
        """Id of the engine's process, which changes with each restart."""
        return self.seen.instance

    @property
    def state(self) -> str:
        """``up``, ``draining`` or ``suspect``."""
        return "suspect" if self.suspect else "draining" if self.is_draining else "up"

    def status(self, requests: int, tokens: int) -> PairEngineStatus:
        """Return the status of the engine, for operators. Its ``links`` are empty. ``requests``: number of
        requests that the engine is working on. ``tokens``: total context length of these requests."""
        seen = self.seen
        load = tokens / seen.kv_tokens
        if seen.max_running and seen.role is PairRole.DECODE:  # prefill engines have no such bound
            load = max(load, requests / seen.max_running)
        return PairEngineStatus(
            seen.replica_id,
            seen.instance,
            self.state,
            round(load, 4),
            requests,
            0,
            0,
            seen.kv_tokens,
            0,
            max(0, seen.kv_tokens - tokens),
            role=seen.role.value,
            node=seen.node,
            epoch=seen.epoch,
            links={},
        )


class RoleSummary(NamedTuple):
    """What the registered engines of both roles can serve. Lengths are in tokens; 0: unknown."""

    missing: PairRole | None
    """A role without engines; ``None``: both roles have engines. Suspect engines count, draining engines do
    not."""
    max_context_tokens: int
    """Longest context that both roles can hold."""
    decode_context_tokens: int
    """Longest context that a decode engine can hold, the answer included."""


def summarize_roles(engines: Iterable[PairEngine]) -> RoleSummary:
    """Return the summary of all registered engines."""
    present = set()
    longest = dict.fromkeys(PairRole, 0)
    for engine in engines:
        seen = engine.seen
        if not engine.is_draining:
            present.add(seen.role)
        longest[seen.role] = max(longest[seen.role], seen.max_context_tokens or seen.kv_tokens)
    return RoleSummary(
        next((role for role in PairRole if role not in present), None),
        min((tokens for tokens in longest.values() if tokens), default=0),
        longest[PairRole.DECODE],
    )


@dataclass(slots=True, eq=False)
class PairProgram:
    """Record of a program that has or had requests."""

    key: Key
    last_s: float
    """Time of the program's last event, on the core's clock."""
    stored_tokens: int = 0
    """Number of context tokens whose KV is in storage: prompt and output of the last answered turn."""
    turns: int = 0
    """Number of answered requests."""
    answered_by: str | None = None
    """Id of the decode engine of the last answer."""
    requests: int = 0
    """Number of requests in progress."""

    @property
    def is_idle(self) -> bool:
        """Whether the program has no open request."""
        return not self.requests

    def status(self, waiting: int) -> ProgramRouteStatus:
        """Return the status of the program, for operators. Both token counts in it are ``stored_tokens``.
        ``waiting``: number of the program's requests that wait for a pair."""
        (tenant, name), stored, in_flight = self.key, self.stored_tokens, self.requests - waiting
        return ProgramRouteStatus(name, tenant, None, self.turns, stored, stored, 0, in_flight, waiting)


@dataclass(slots=True)
class PairRequest:
    """A request in progress in a pair core. Times are on the core's clock."""

    asked: RequestReceived
    since_s: float
    """Time at which the request arrived."""
    waiting_since_s: float
    """Time at which the request began to wait for a pair."""
    program: PairProgram | None = None
    """Record of the request's program; ``None``: the request has no program. The table of programs may no
    longer have this record. It may even have another record, for a later program with the same id."""
    prefill_id: str | None = None
    decode_id: str | None = None
    """Id of the request's decode engine; ``None``: the request waits for a pair."""
    prefilled: bool = False
    began: bool = False
    """Whether the client has the first byte of the answer."""
    sent: SendRequestToPair | None = None
    """The last ``SendRequestToPair`` for the request; ``None``: this core has not sent it."""
    adopted: bool = False
    """True if another core or a gateway chose the request's engines. The pair scheduler does not count such a
    request."""
    failures: int = 0
    """Number of pairs that did not answer the request."""
    failures_computing: int = 0
    """Number of pairs that lost the request after one of their engines had accepted it."""
    lost_with: str | None = None
    """Id of the last engine that was removed while it had the request. ``None`` again once a
    ``RequestFailed`` reports that the engine had accepted the request."""

    def is_at(self, replica_id: str) -> bool:
        """Whether the engine still has work for the request. The decode engine has work until the request
        ends, the prefill engine until the prompt is computed."""
        return replica_id == self.decode_id or (replica_id == self.prefill_id and not self.prefilled)
