"""The record of each turn that is under way, from its request's arrival until it goes into the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..metrics.metrics_recorder import MetricsRecorder
from ..metrics.turn_ledger import LossCause, TokenSplit, TurnLedger, TurnRecord, split_tokens
from ..programs.program_state import ProgramState
from .events_and_actions import RequestAdmitted, RequestArrived, TurnFinished
from .lease_manager import LeaseManager
from .request_hint import clipped
from .scheduler_state import Histories, KVPoolConfig

_EVICTED = frozenset({LossCause.EVICTED, LossCause.EXPIRED, LossCause.SILENT, LossCause.PRESSURE})
"""Losses of programs that had been evicted, in the sense of Continuum's T̄."""


class TurnRecorder:
    """Writes the records of one engine's turns. Times are seconds on its monotonic clock."""

    def __init__(
        self,
        pool: KVPoolConfig,
        *,
        ledger: TurnLedger,
        histories: Histories,
        lease_manager: LeaseManager,
        recorder: MetricsRecorder,
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._histories = histories
        self._lease_manager = lease_manager
        self._recorder = recorder
        self.awaiting_first_token: dict[str, TurnRecord] = {}
        """Of requests that were admitted and have no output token yet, by their ids."""

    def open(
        self,
        fact: RequestArrived,
        program: ProgramState,
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
        program: ProgramState,
        fact: RequestAdmitted,
        before: Sequence[Any] | None,
        shared: int | None,
        now: float,
    ) -> None:
        """The request got its blocks for the first time: split its prompt by where the tokens came from.

        ``before`` is the program's last context, whose first ``shared`` blocks the prompt begins with;
        ``None``: it is not known.
        """
        record.admitted_s = now
        self.awaiting_first_token[fact.request_id] = record
        cause, evicted_block = self._lease_manager.cause(program, before, fact)
        if evicted_block is not None:
            record.evictor, record.evicted_score = evicted_block.evictor, evicted_block.score
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
        record = self.awaiting_first_token.pop(request_id, None)
        if record is not None:
            record.first_token_s = now

    def close(self, record: TurnRecord, fact: TurnFinished, now: float) -> None:
        """The request has left the engine: its record goes into the ledger, and what it says is counted."""
        self.awaiting_first_token.pop(fact.request_id, None)
        record.finished_s = now
        record.output_tokens = fact.output_tokens
        record.outcome = fact.outcome.value
        self._ledger.close(record)
        self._recorder.count("sojourn_program_turns_total", outcome=fact.outcome.value)
        if record.recomputed_after_preemption:
            self._recorder.count(
                "sojourn_lost_tokens_total",
                record.recomputed_after_preemption,
                cause=LossCause.PREEMPTED.value,
            )
        if record.tokens is not None:
            self._count_tokens(record.tokens)

    def _count_tokens(self, split: TokenSplit) -> None:
        for result in ("device", "host", "new", "tail"):
            self._recorder.count("sojourn_prompt_tokens_total", getattr(split, result), result=result)
        for cause, tokens in split.lost.items():
            self._recorder.count("sojourn_prompt_tokens_total", tokens, result="lost")
            self._recorder.count("sojourn_lost_tokens_total", tokens, cause=cause.value)
            if cause is not LossCause.CHANGED:
                regretted = tokens // self._pool.block_size
                self._recorder.count("sojourn_evictions_regretted_total", regretted, tier="device")
