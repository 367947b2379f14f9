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
    """The engine's number in the pair scheduler, a new one after each restart; ``None``: not in the
    scheduler."""
    is_open: bool = False
    """Whether requests may be sent to the engine."""
    draining: bool = False
    suspect: bool = False
    """Whether the engine failed at a request or was silent for too long, and has not reported since."""
    probed_s: float | None = None

    @property
    def replica_id(self) -> str:
        """Replica id of the engine."""
        return self.seen.replica_id

    @property
    def instance(self) -> str:
        """Id of the engine's process, which changes with each restart."""
        return self.seen.instance

    @property
    def state(self) -> str:
        """Health of the engine, for gateways."""
        return "suspect" if self.suspect else "draining" if self.draining else "up"

    @property
    def is_draining(self) -> bool:
        """Whether the engine gets no new requests because it drains."""
        return self.draining

    def status(self, requests: int, tokens: int) -> PairEngineStatus:
        """Status of the engine, for operators; ``links`` is empty. ``requests``: number of requests in
        progress there. ``tokens``: their total context length."""
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
    """What the core knows of a program that has or had requests."""

    stored_tokens: int = 0
    """Context length known to be in storage: the length at the end of the last answer."""
    turns: int = 0
    """Number of answered requests."""
    answered_by: str | None = None
    """Id of the decode engine of the last answer."""
    requests: int = 0
    """Number of requests in progress."""

    def status(self, key: Key, waiting: int) -> ProgramRouteStatus:
        """Status of the program, for operators. Its context length counts what is in storage. ``waiting``:
        number of its requests that wait for a pair."""
        stored, in_flight = self.stored_tokens, self.requests - waiting
        return ProgramRouteStatus(key[1], key[0], None, self.turns, stored, stored, 0, in_flight, waiting)


@dataclass(slots=True)
class PairRequest:
    """A request in progress."""

    asked: RequestReceived
    since_s: float
    waiting_since_s: float
    """Time at which the request began to wait for a pair."""
    prefill_id: str | None = None
    decode_id: str | None = None
    prefilled: bool = False
    began: bool = False
    sent: SendRequestToPair | None = None
    """The last pair chosen for the request."""
    adopted: bool = False
    """True if another core or a gateway chose the request's engines. The pair scheduler does not count such a
    request."""
    failures: int = 0
    failures_computing: int = 0

    def is_at(self, replica_id: str) -> bool:
        """Whether this engine is still working on the request."""
        return replica_id == self.decode_id or (replica_id == self.prefill_id and not self.prefilled)
