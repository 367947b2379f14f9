"""The record of each turn that is under way, from its request's arrival until it goes into the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..metrics.ledger import Ledger, Lost, TokenSplit, TurnRecord, split_tokens
from ..metrics.recorder import Recorder
from ..program.record import Program
from .facts import Admission, Arrival, TurnEnd
from .hint import clipped
from .keeper import Keeper
from .state import Histories, Pool

_EVICTED = frozenset({Lost.EVICTED, Lost.EXPIRED, Lost.SILENT, Lost.PRESSURE})
"""Losses of programs that had been evicted, in the sense of Continuum's T̄."""


class TurnRecords:
    """Writes the records of one engine's turns. Times are seconds on its monotonic clock."""

    def __init__(
        self, pool: Pool, *, ledger: Ledger, histories: Histories, keeper: Keeper, recorder: Recorder
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._histories = histories
        self._keeper = keeper
        self._recorder = recorder
        self.unstarted: dict[str, TurnRecord] = {}
        """Of requests that were admitted and have no output token yet, by their ids."""

    def open(
        self,
        fact: Arrival,
        program: Program,
        *,
        tool: str | None,
        gap_s: float | None,
        leased: bool,
        now: float,
    ) -> TurnRecord:
        """A record for the request that has arrived, after ``gap_s`` seconds in which ``tool`` ran."""
        context = fact.identity.context
        return TurnRecord(
            program.id,
            program.turns + 1,
            fact.request_id,
            now,
            tool_before=tool,
            gap_s=gap_s,
            leased=leased,
            client_request_id=clipped(context.request_id) if context is not None else None,
        )

    def admitted(
        self,
        record: TurnRecord,
        program: Program,
        fact: Admission,
        before: Sequence[Any] | None,
        shared: int | None,
        now: float,
    ) -> None:
        """The request got its blocks for the first time: split its prompt by where the tokens came from.

        ``before`` is the program's last context, whose first ``shared`` blocks the prompt begins with;
        ``None``: it is not known.
        """
        record.admitted_s = now
        self.unstarted[fact.request_id] = record
        cause, stone = self._keeper.cause(program, before, fact)
        if stone is not None:
            record.evictor, record.evicted_score = stone.evictor, stone.score
        split = split_tokens(
            prompt=fact.tokens,
            device=fact.cached_tokens,
            block_size=self._pool.block_size,
            before_tokens=program.context_tokens,
            before_full_blocks=len(before) if before is not None else 0,
            shared_blocks=shared,
            cause=cause,
            dropped_hit_blocks=self._pool.dropped_hit_blocks,
        )
        record.tokens = replace(split, device=split.device - fact.host_tokens, host=fact.host_tokens)
        if program.turns and any(cause in _EVICTED for cause in record.tokens.lost):
            self._histories.evicted_waits.observe(now - record.arrived_s)

    def first_token(self, request_id: str, now: float) -> None:
        """A request's first output token exists."""
        record = self.unstarted.pop(request_id, None)
        if record is not None:
            record.first_token_s = now

    def close(self, record: TurnRecord, fact: TurnEnd, now: float) -> None:
        """The request has left the engine: its record goes into the ledger, and what it says is counted."""
        self.unstarted.pop(fact.request_id, None)
        record.finished_s = now
        record.output_tokens = fact.output_tokens
        record.outcome = fact.outcome.value
        self._ledger.close(record)
        self._recorder.count("sojourn_program_turns_total", outcome=fact.outcome.value)
        if record.recomputed_after_preemption:
            self._recorder.count(
                "sojourn_lost_tokens_total", record.recomputed_after_preemption, cause=Lost.PREEMPTED.value
            )
        if record.tokens is not None:
            self._count_tokens(record.tokens)

    def _count_tokens(self, split: TokenSplit) -> None:
        for result in ("device", "host", "new", "tail"):
            self._recorder.count("sojourn_prompt_tokens_total", getattr(split, result), result=result)
        for cause, tokens in split.lost.items():
            self._recorder.count("sojourn_prompt_tokens_total", tokens, result="lost")
            self._recorder.count("sojourn_lost_tokens_total", tokens, cause=cause.value)
            if cause is not Lost.CHANGED:
                regretted = tokens // self._pool.block_size
                self._recorder.count("sojourn_evictions_regretted_total", regretted, tier="device")
