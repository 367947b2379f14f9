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
    """The engine's last registration or report."""
    heard_s: float
    """Time of that report, on the core's clock."""
    number: int | None = None
    """The engine's number in the pair scheduler; ``None``: the scheduler does not have the engine. Each
    restart of the engine gets a new number."""
    is_open: bool = False
    """Whether new requests may be sent to the engine."""
    draining: bool = False
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
        return "suspect" if self.suspect else "draining" if self.draining else "up"

    @property
    def is_draining(self) -> bool:
        """Whether the engine gets no new requests because it drains."""
        return self.draining

    def status(self, requests: int, tokens: int) -> PairEngineStatus:
        """Status of the engine, for operators; ``links`` is empty. ``requests``: number of requests that the
        engine is working on. ``tokens``: total context length of these requests."""
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
    """Number of context tokens whose KV is in storage: prompt and output of the last answered turn."""
    turns: int = 0
    """Number of answered requests."""
    answered_by: str | None = None
    """Id of the decode engine of the last answer."""
    requests: int = 0
    """Number of requests in progress."""

    def status(self, key: Key, waiting: int) -> ProgramRouteStatus:
        """Status of the program, for operators. Its token counts are ``stored_tokens``. ``waiting``: number
        of its requests that wait for a pair."""
        stored, in_flight = self.stored_tokens, self.requests - waiting
        return ProgramRouteStatus(key[1], key[0], None, self.turns, stored, stored, 0, in_flight, waiting)


@dataclass(slots=True)
class PairRequest:
    """A request in progress in a pair core. Times are on the core's clock."""

    asked: RequestReceived
    since_s: float
    """Time at which the request arrived."""
    waiting_since_s: float
    """Time at which the request began to wait for a pair."""
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
    failures_computing: int = 0

    def is_at(self, replica_id: str) -> bool:
        """Whether the engine still has work for the request. The decode engine has work until the request
        ends, the prefill engine until the prompt is computed."""
        return replica_id == self.decode_id or (replica_id == self.prefill_id and not self.prefilled)
