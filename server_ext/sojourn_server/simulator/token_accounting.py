"""What each request was spared and what it cost, counted from the scheduler's own decisions.

The same rule for every policy, the untouched engine included: it looks at what
is scheduled, never into an adapter, but for the reason of a loss, which only an
adapter knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .latency.latency_model import StepWork
from .run_log import TurnLog

if TYPE_CHECKING:
    from ..vllm.compat import Request, SchedulerOutput


MOVED_CAUSE = "moved"
"""Cause of computing again what another engine of the cluster has computed, and this one never has."""


@dataclass(slots=True)
class InFlightTurn:
    """A request in the engine."""

    life: TurnLog
    output: list[int]
    """Token ids it is made to generate."""
    prefill_until: int = 0
    """Tokens that count as prefill: all it had when it was last admitted."""
    admitted: bool = False
    computed: int = 0
    """Tokens whose KV it holds."""
    had: int = 0
    """Tokens in full blocks that it gave up when it was last preempted."""
    reached: int = 0
    """The most tokens whose KV it ever held."""
    preempted_s: float | None = None
    """Since when it waits to be taken up again; ``None``: it does not."""
    loading_tokens: int = 0
    """Tokens on their way from host memory, or come since it was last admitted."""
    hashes: list[bytes] = field(default_factory=list)
    """Of the full blocks it left behind."""
    request: Any = None


class TokenAccounting:
    """Everything computed, found and lost, of one engine.

    ``elsewhere`` are the hashes of all blocks that any engine of a cluster has ever computed; the accounts of
    its engines share it. Without it this engine is all there is.
    """

    def __init__(self, block_size: int, elsewhere: set[bytes] | None = None) -> None:
        self._block_size = block_size
        self._computed: set[bytes] = set()
        """Hashes of all blocks that were ever computed: what an endless cache would hold."""
        self._elsewhere = elsewhere
        self.live: dict[str, InFlightTurn] = {}

    def step(
        self, planned: SchedulerOutput, requests: dict[str, Request], now: float
    ) -> tuple[StepWork, list[InFlightTurn]]:
        """Take in a planned step. Returns its work, and whose first token it makes."""
        # A set: sorted, so that the same run is the same run.
        for request_id in sorted(planned.preempted_req_ids or ()):
            self._preempted(requests[request_id], now)
        for new in planned.scheduled_new_reqs:
            self._admitted(requests[new.req_id], new.num_computed_tokens, now)
        cached = planned.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids:
                    self._admitted(requests[request_id], computed, now)
        prefill = pairs = prefill_pairs = read = sampled = 0
        first: list[InFlightTurn] = []
        live = self.live
        for request_id, new_tokens in planned.num_scheduled_tokens.items():
            request, turn = requests[request_id], live[request_id]
            context = request.num_computed_tokens
            before = context - new_tokens
            turn.computed = context
            read += context
            if context >= request.num_tokens:
                sampled += 1
                if turn.life.first_token_s is None:
                    first.append(turn)
            if new_tokens == 1:
                pairs += context
                if before < turn.prefill_until:
                    turn.life.computed_tokens += 1
            else:
                mine = new_tokens * before + new_tokens * (new_tokens + 1) // 2
                pairs += mine
                prefill_pairs += mine
                prefill += new_tokens
                turn.life.computed_tokens += new_tokens
        work = StepWork(
            requests=len(planned.num_scheduled_tokens),
            tokens=planned.total_num_scheduled_tokens,
            prefill_tokens=prefill,
            attention_pairs=pairs,
            prefill_attention_pairs=prefill_pairs,
            kv_tokens_read=read,
            sampled=sampled,
        )
        return work, first

    def _admitted(self, request: Request, computed: int, now: float) -> None:
        turn = self.live[request.request_id]
        life = turn.life
        size = self._block_size
        turn.prefill_until = request.num_tokens
        _end_preemption(turn, now)
        from_host = min(turn.loading_tokens, computed)
        turn.loading_tokens = 0
        if turn.admitted:
            # What it had and does not find again it computes again. What it had not come to yet when it was
            # preempted was counted when it was first admitted; others may have computed some of that since.
            lost = max(0, turn.had - computed)
            if lost:
                _add_loss(life, "preempted", lost)
            self._reduce_losses(life, min(computed, life.known_tokens) - turn.reached)
        else:
            turn.admitted = True
            life.admitted_s = now
            here = self._known(request, self._computed) * size
            life.known_tokens = here
            life.device_tokens = computed - from_host
            if here > computed:
                _add_loss(life, "evicted", here - computed)
            if self._elsewhere is not None:
                life.known_tokens = self._known(request, self._elsewhere) * size
                if life.known_tokens > max(here, computed):
                    _add_loss(life, MOVED_CAUSE, life.known_tokens - max(here, computed))
        turn.reached = max(turn.reached, computed)
        life.host_tokens += from_host

    def _known(self, request: Request, computed: set[bytes]) -> int:
        """Leading blocks of a prompt that were computed before. The engine never takes a whole prompt from
        its cache: the last token is computed, to have something to sample from."""
        usable = (request.num_tokens - 1) // self._block_size
        known = 0
        for block_hash in request.block_hashes[:usable]:
            if block_hash not in computed:
                break
            known += 1
        return known

    def loading(self, request_id: str, blocks: int) -> None:
        """Blocks of a waiting request are on their way from host memory."""
        turn = self.live.get(request_id)
        if turn is not None:
            turn.loading_tokens += blocks * self._block_size

    def _preempted(self, request: Request, now: float) -> None:
        turn = self.live[request.request_id]
        turn.life.preemptions += 1
        turn.preempted_s = now
        full = turn.computed // self._block_size
        turn.had = full * self._block_size
        turn.reached = max(turn.reached, turn.computed)
        turn.computed = 0
        self._note(request.block_hashes[:full])

    def finished(self, request_id: str, now: float) -> InFlightTurn:
        """A request has left the engine, with everything it computed."""
        turn = self.live.pop(request_id)
        _end_preemption(turn, now)
        request = turn.request
        turn.life.finished_s = now
        turn.life.output_tokens = request.num_output_tokens
        # Its last token was sampled, and never computed.
        full = (request.num_tokens - 1) // self._block_size
        turn.hashes = list(request.block_hashes[:full])
        self._note(turn.hashes)
        return turn

    def recalled(self, request_id: str, now: float) -> InFlightTurn:
        """A gateway takes a request back before it has made a token: what it computed was for nothing, and
        is known from now on. Its engine is to abort it before it takes anything in."""
        turn = self.live.pop(request_id)
        _end_preemption(turn, now)
        self._note(turn.request.block_hashes[: turn.computed // self._block_size])
        life = turn.life
        self._reduce_losses(life, life.known_tokens - max(turn.reached, turn.computed))
        if turn.computed:
            _subtract_loss(life, "preempted", turn.had - turn.computed)
        return turn

    def cut_off(self, now: float) -> None:
        """The run ends. What requests were to compute again, and had not come to, was not computed again."""
        for turn in self.live.values():
            _end_preemption(turn, now)
            turn.life.generated_tokens = turn.request.num_output_tokens
            self._reduce_losses(turn.life, turn.life.known_tokens - max(turn.reached, turn.computed))
            if turn.computed:
                _subtract_loss(turn.life, "preempted", turn.had - turn.computed)

    def _note(self, hashes: Iterable[bytes]) -> None:
        """These blocks have been computed."""
        hashes = list(hashes)
        self._computed.update(hashes)
        if self._elsewhere is not None:
            self._elsewhere.update(hashes)

    @staticmethod
    def _reduce_losses(life: TurnLog, tokens: int) -> None:
        """So many tokens at the end of what was known were not computed again after all."""
        moved = min(max(0, tokens), life.regenerated.get(MOVED_CAUSE, 0))
        _subtract_loss(life, MOVED_CAUSE, moved)
        _subtract_loss(life, "evicted", tokens - moved)


def _end_preemption(turn: InFlightTurn, now: float) -> None:
    if turn.preempted_s is None:
        return
    waited_s, turn.preempted_s = now - turn.preempted_s, None
    if turn.life.first_token_s is None:
        turn.life.preempted_before_first_token_s += waited_s
    else:
        turn.life.preempted_after_s += waited_s


def _add_loss(life: TurnLog, cause: str, tokens: int) -> None:
    life.regenerated[cause] = life.regenerated.get(cause, 0) + tokens


def _subtract_loss(life: TurnLog, cause: str, tokens: int) -> None:
    counted = life.regenerated.get(cause, 0)
    if counted and tokens > 0:
        life.regenerated[cause] = max(0, counted - tokens)
        if not life.regenerated[cause]:
            del life.regenerated[cause]


def annotate_from_scheduler(life: TurnLog, program_scheduler: Any) -> None:
    """Of a finished turn, what only an adapter's steward knows: whether its program goes on, and why what was
    lost is gone."""
    life.goes_on = program_scheduler.continuation_probability(life.program_id)
    if life.regenerated.get("evicted"):
        records = program_scheduler.turns_of(life.program_id)
        if records:
            _split_losses_by_cause(life, records[-1])


def _split_losses_by_cause(life: TurnLog, record: Any) -> None:
    """Split a turn's ``evicted`` tokens by the causes an adapter's ledger gives, as far as they go, and note
    who took them."""
    life.evictor = getattr(record, "evictor", None)
    score = getattr(record, "evicted_score", None)
    life.evicted_score = None if score is None else tuple(map(float, score))
    evicted = life.regenerated.pop("evicted", 0)
    lost = getattr(getattr(record, "tokens", None), "lost", None) or {}
    for cause, tokens in lost.items():
        mine = min(evicted, tokens)
        if mine > 0:
            name = str(cause.value)
            life.regenerated[name] = life.regenerated.get(name, 0) + mine
            evicted -= mine
    if evicted:
        life.regenerated["evicted"] = life.regenerated.get("evicted", 0) + evicted
