"""Records of a pair core: engines, programs and requests."""

from __future__ import annotations

from dataclasses import dataclass

from .routed_programs import Key
from .routing_events import PairEngineRegistered, PairRole, RequestReceived, SendRequestToPair
from .routing_status import PairEngineStatus, ProgramRouteStatus


@dataclass(slots=True)
class PairEngine:
    """A prefill or decode engine."""

    seen: PairEngineRegistered
    heard_s: float
    number: int | None = None
    """Its number in the pair scheduler, new after each restart; ``None``: not added yet."""
    is_open: bool = False
    """Requests may go there."""
    draining: bool = False
    suspect: bool = False
    """Whether it failed at a request, or has been silent for too long, and has not reported since."""
    probed_s: float | None = None

    @property
    def replica_id(self) -> str:
        """Its id."""
        return self.seen.replica_id

    @property
    def instance(self) -> str:
        """Changes with each restart."""
        return self.seen.instance

    @property
    def state(self) -> str:
        """Its health, for gateways."""
        return "suspect" if self.suspect else "draining" if self.draining else "up"

    @property
    def is_draining(self) -> bool:
        """Whether it gets no new requests."""
        return self.draining

    def status(self, requests: int, tokens: int) -> PairEngineStatus:
        """Its state with these requests in progress, for operators; without ``links``."""
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


@dataclass(slots=True)
class PairProgram:
    """A program with requests, now or earlier."""

    stored_tokens: int = 0
    """Context known to be in storage: its length at the end of the last answer."""
    turns: int = 0
    """Answered requests."""
    answered_by: str | None = None
    """Decode engine of the last answer."""
    requests: int = 0
    """Requests in progress."""

    def status(self, key: Key, waiting: int) -> ProgramRouteStatus:
        """Its state, for operators. Its context is what is in storage."""
        stored, in_flight = self.stored_tokens, self.requests - waiting
        return ProgramRouteStatus(key[1], key[0], None, self.turns, stored, stored, 0, in_flight, waiting)


@dataclass(slots=True)
class PairRequest:
    """A request in progress."""

    asked: RequestReceived
    since_s: float
    waiting_since_s: float
    """Time since which it has no pair."""
    prefill_id: str | None = None
    decode_id: str | None = None
    prefilled: bool = False
    began: bool = False
    sent: SendRequestToPair | None = None
    """The last decision."""
    adopted: bool = False
    """Another core or a gateway chose its engines; the pair scheduler does not count it."""
    failures: int = 0
    failures_computing: int = 0

    def is_at(self, replica_id: str) -> bool:
        """Whether an engine is still working on it."""
        return replica_id == self.decode_id or (replica_id == self.prefill_id and not self.prefilled)
