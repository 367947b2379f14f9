"""Counts the cached, computed and recomputed tokens of each request from vLLM's scheduler outputs.

A *loss* is a number of tokens that a request recomputes. The counts of different policies are comparable,
because every policy has scheduler outputs. Only the finer causes of losses come from sojourn's scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from sojourn.ids import ProgramId

from .latency.latency_models import StepWork
from .run_log import TurnLog

if TYPE_CHECKING:
    from ..core.program_scheduler import ProgramScheduler
    from ..vllm.compat import Request, SchedulerOutput


MOVED_CAUSE = "moved"
"""Cause of a loss: the tokens had been computed before, but only by another engine of the cluster."""


@dataclass(slots=True)
class InFlightTurn:
    """A request in the engine."""

    log: TurnLog
    output: list[int]
    """Token ids that the request will generate."""
    prefill_until: int = 0
    """Number of the request's tokens at its last admission. Computing these tokens counts as prefill."""
    admitted: bool = False
    computed: int = 0
    """Number of tokens whose KV the request holds."""
    full_block_tokens_before_preemption: int = 0
    """Number of tokens in the request's full blocks just before its last preemption."""
    reached: int = 0
    """Largest value of ``computed`` so far. A preemption resets ``computed`` to 0, but not ``reached``."""
    preempted_s: float | None = None
    """Time of the last preemption if the request waits to resume; else ``None``."""
    loading_tokens: int = 0
    """Tokens that are being loaded from host memory, or were loaded since the last admission."""
    request: Any = None


class TokenAccounting:
    """Computed, cached and lost tokens of the requests of one engine. All times are virtual seconds."""

    def __init__(self, block_size: int, cluster_computed: set[bytes] | None) -> None:
        """``cluster_computed``: hashes of all blocks that any engine of the cluster has computed. All engines
        share this set and add to it. ``None`` for a single engine."""
        self._block_size = block_size
        self._computed: set[bytes] = set()
        """Hashes of all blocks that this engine has computed, as an unlimited cache would hold them."""
        self._cluster_computed = cluster_computed
        self.live: dict[str, InFlightTurn] = {}
        """Requests in the engine, by request id."""

    def step(
        self, planned: SchedulerOutput, requests: dict[str, Request], now: float
    ) -> tuple[StepWork, dict[str, InFlightTurn]]:
        """Account for a scheduled step. Returns its work, and the requests that get a token, by id."""
        # The ids are a set, which is sorted so that runs are repeatable.
        for request_id in sorted(planned.preempted_req_ids or ()):
            self._preempted(requests[request_id], now)
        for new in planned.scheduled_new_reqs:
            self._admitted(requests[new.req_id], new.num_computed_tokens, now)
        cached = planned.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids:
                    self._admitted(requests[request_id], computed, now)
        pairs = read = 0
        sampled: dict[str, InFlightTurn] = {}
        live = self.live
        for request_id, new_tokens in planned.num_scheduled_tokens.items():
            request, turn = requests[request_id], live[request_id]
            context = request.num_computed_tokens
            before = context - new_tokens
            turn.computed = context
            read += context
            if context >= request.num_tokens:
                sampled[request_id] = turn
            if new_tokens == 1:
                pairs += context
                if before < turn.prefill_until:
                    turn.log.computed_tokens += 1
            else:
                pairs += new_tokens * before + new_tokens * (new_tokens + 1) // 2
                turn.log.computed_tokens += new_tokens
        work = StepWork(
            requests=len(planned.num_scheduled_tokens),
            tokens=planned.total_num_scheduled_tokens,
            attention_pairs=pairs,
            kv_tokens_read=read,
            sampled=len(sampled),
        )
        return work, sampled

    def _admitted(self, request: Request, computed: int, now: float) -> None:
        turn = self.live[request.request_id]
        log = turn.log
        size = self._block_size
        turn.prefill_until = request.num_tokens
        _end_preemption(turn, now)
        from_host = min(turn.loading_tokens, computed)
        turn.loading_tokens = 0
        if turn.admitted:
            # The request resumes. Full blocks that it had before its preemption and does not find now are a
            # loss. Its first admission counted losses of known tokens up to the end of its prompt. If it
            # finds tokens that it had not reached, other requests have recomputed them: not its loss.
            lost = max(0, turn.full_block_tokens_before_preemption - computed)
            if lost:
                log.regenerated["preempted"] += lost
            _reduce_losses(log, min(computed, log.known_tokens) - turn.reached)
        else:
            turn.admitted = True
            log.admitted_s = now
            here = self._leading_computed_blocks(request, self._computed) * size
            log.known_tokens = here
            log.device_tokens = computed - from_host
            if here > computed:
                log.regenerated["evicted"] += here - computed
            if self._cluster_computed is not None:
                log.known_tokens = self._leading_computed_blocks(request, self._cluster_computed) * size
                if log.known_tokens > max(here, computed):
                    log.regenerated[MOVED_CAUSE] += log.known_tokens - max(here, computed)
        turn.reached = max(turn.reached, computed)
        log.host_tokens += from_host

    def _leading_computed_blocks(self, request: Request, computed: set[bytes]) -> int:
        """Number of leading full blocks of a request whose hashes are in ``computed``. The block with the
        request's last token does not count, since vLLM always computes that token."""
        usable = request.block_hashes[: (request.num_tokens - 1) // self._block_size]
        return sum(1 for _ in takewhile(computed.__contains__, usable))

    def loading(self, request_id: str, blocks: int) -> None:
        """Account for a load of ``blocks`` blocks from host memory for a waiting request."""
        turn = self.live.get(request_id)
        if turn is not None:
            turn.loading_tokens = blocks * self._block_size  # an earlier load may have been given up

    def _preempted(self, request: Request, now: float) -> None:
        turn = self.live[request.request_id]
        turn.log.preemptions += 1
        turn.preempted_s = now
        full = turn.computed // self._block_size
        turn.full_block_tokens_before_preemption = full * self._block_size
        turn.reached = max(turn.reached, turn.computed)
        turn.computed = 0
        self._mark_computed(request.block_hashes[:full])

    def finished(self, request_id: str, now: float) -> InFlightTurn:
        """Account for a finished request and its blocks. Returns its turn and removes it from ``live``."""
        turn = self.live.pop(request_id)
        _end_preemption(turn, now)
        request = turn.request
        turn.log.finished_s = now
        turn.log.output_tokens = request.num_output_tokens
        # The last token was sampled and never computed.
        full = (request.num_tokens - 1) // self._block_size
        self._mark_computed(request.block_hashes[:full])
        return turn

    def recalled(self, request_id: str, now: float) -> InFlightTurn:
        """Account for a request that a gateway withdraws before its first token. Returns its turn. The full
        blocks that it computed count as computed, so computing them again is a loss."""
        turn = self.live.pop(request_id)
        _end_preemption(turn, now)
        self._mark_computed(turn.request.block_hashes[: turn.computed // self._block_size])
        _drop_uncomputed_losses(turn)
        return turn

    def cut_off(self, now: float) -> None:
        """Account for the requests that the end of the run cuts off. Lost tokens that such a request has not
        recomputed yet are subtracted from its losses."""
        for turn in self.live.values():
            _end_preemption(turn, now)
            turn.log.generated_tokens = turn.request.num_output_tokens
            _drop_uncomputed_losses(turn)

    def _mark_computed(self, hashes: Sequence[bytes]) -> None:
        self._computed.update(hashes)
        if self._cluster_computed is not None:
            self._cluster_computed.update(hashes)


def _end_preemption(turn: InFlightTurn, now: float) -> None:
    """If the turn waits to resume after a preemption, end the wait and add its seconds to the log."""
    if turn.preempted_s is None:
        return
    waited_s, turn.preempted_s = now - turn.preempted_s, None
    if turn.log.first_token_s is None:
        turn.log.preempted_before_first_token_s += waited_s
    else:
        turn.log.preempted_after_s += waited_s


def _drop_uncomputed_losses(turn: InFlightTurn) -> None:
    """Subtract from the losses of an unfinished turn the tokens that it has not recomputed yet."""
    _reduce_losses(turn.log, turn.log.known_tokens - max(turn.reached, turn.computed))
    if turn.computed:
        again = turn.full_block_tokens_before_preemption - turn.computed
        _subtract_losses(turn.log, preempted=again)


def _reduce_losses(log: TurnLog, tokens: int) -> None:
    """Subtract from the losses ``tokens`` that the turn did not recompute after all: first from ``moved``,
    then from ``evicted``."""
    moved = min(max(0, tokens), log.regenerated.get(MOVED_CAUSE, 0))
    _subtract_losses(log, moved=moved, evicted=tokens - moved)


def _subtract_losses(log: TurnLog, **tokens: int) -> None:
    counted = Counter({cause: max(0, number) for cause, number in tokens.items()})
    log.regenerated = Counter(log.regenerated) - counted


def annotate_from_scheduler(log: TurnLog, program_scheduler: ProgramScheduler) -> None:
    """Add to a finished turn's log what only sojourn's scheduler knows: the predicted probability of another
    turn, and for ``evicted`` tokens the finer causes of its ledger, the evicting program and the score.
    Tokens that the ledger does not explain stay ``evicted``."""
    program_id = ProgramId(log.program_id)
    program = program_scheduler.program(program_id)
    log.goes_on = program.continuation_probability if program is not None else None
    records = program_scheduler.turns_of(program_id) if log.regenerated.get("evicted") else ()
    if not records:
        return
    record = records[-1]
    log.evictor = record.evictor
    score = record.evicted_score
    log.evicted_score = None if score is None else tuple(map(float, score))
    evicted = log.regenerated.pop("evicted")
    for cause, tokens in (record.tokens.lost if record.tokens is not None else {}).items():
        explained = min(evicted, tokens)
        if explained > 0:
            log.regenerated[str(cause.value)] += explained
            evicted -= explained
    if evicted:
        log.regenerated["evicted"] = evicted
