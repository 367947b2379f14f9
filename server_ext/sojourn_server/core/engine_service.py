"""Carries out the operations of an engine's HTTP routes: JSON arguments in, JSON out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from sojourn import wire_codec
from sojourn.ids import ProgramId, id_problem
from sojourn.wire_codec import WIRE_VERSION, EventOutcome, OutcomeBatch, WireError

from ..metrics.live_frame import EngineRow, EngineSnapshot, ProgramRow, ProgramSummary
from ..metrics.metrics_recorder import MetricsRecorder, count_links
from ..policies.placement.placement_views import Tier
from ..policies.retention_policies import MAX_TTL_S, RetentionPolicy
from ..programs.program_state import ProgramState
from ..programs.program_status import OVER_STATUSES, ProgramStatus
from ..programs.workflow_history import agent_type_name
from . import engine_answers as answers
from .event_limits import EVENT_TYPES, MAX_ATTACHED_EVENTS, undecodable_outcome
from .events_and_actions import Action, ClientEventReceived, Event, PolicySwitched
from .program_scheduler import ProgramScheduler
from .request_hints import HINTED_TTL, RequestIdentity, unused_fields
from .request_table import RequestState

STOCK_OPERATIONS = ("capabilities", "drain_metrics", "load", "stats")
"""Operations that ``stock_answer`` carries out."""

_Engine = TypeVar("_Engine", bound=EngineRow)
_Summary = TypeVar("_Summary", bound=ProgramSummary)
_batches = msgspec.json.Decoder(list[msgspec.Raw])


class _Arguments(msgspec.Struct):
    """The arguments of all operations."""

    program_id: str = ""
    status: str | None = None
    limit: int | None = None
    since: int = 0
    changed_within_s: float | None = None
    on: bool | None = None


_arguments = msgspec.json.Decoder(_Arguments)


class KVTransferStatus:
    """Status of KV transfer in an engine: the entry ``paths`` in the answers to ``capabilities`` and
    ``stats``; ``None``: unknown, or, as it stands, the engine is in no prefill/decode pair."""

    def capabilities(self) -> dict[str, Any] | None:
        return None

    def stats(self) -> dict[str, Any] | None:
        return None


class EngineView:
    """What the service reads of its engine. As it stands, an engine without tiers, disk, network and pair."""

    engine: Mapping[str, str] = MappingProxyType({})
    """The entry ``engine`` in the answer to ``capabilities``."""
    missing: answers.MissingTiers | None = None
    """The mechanisms that are off for lack of tiers; ``None``: all are on."""
    paths = KVTransferStatus()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Pass an event to the ``ProgramScheduler``, and carry the actions out. Return them."""
        raise NotImplementedError

    def pool_state(self) -> dict[str, int]:
        """Numbers of blocks by state: running, leased, cached, free; and their ``total``."""
        raise NotImplementedError

    def below_blocks(self, program_id: ProgramId) -> tuple[int, int]:
        """Numbers of blocks of a program's context in host memory and on disk."""
        return 0, 0

    def below_device(self) -> answers.TierCapabilities | None:
        """The entry ``tiers`` in the answer to ``capabilities``; ``None`` without tiers."""
        return None

    def tier_state(self) -> dict[str, Any]:
        """``used`` and ``free`` blocks of each tier below the device, numbers of copies by result
        (``moves``), and ``traffic``: bytes moved, seconds of copying, seconds that forward passes waited."""
        return {}

    def network_state(self) -> dict[str, Any] | None:
        """State of the neural network that predicts output lengths; ``None`` without one."""
        return None

    def persist(self, hashes: Sequence[Any]) -> dict[str, Any]:
        """Write blocks to disk. Returns ``stored_blocks``, ``pending_blocks``; if some stay, ``reason``."""
        return {"reason": "there is no disk"}


class EngineService:
    """Carries out ``event_batches`` and ``OPERATIONS``: each of these is a method that takes the arguments
    and the time."""

    OPERATIONS = (
        "capabilities", "policy", "programs", "program", "load", "persist", "stats",
        "snapshot", "decisions", "drain_metrics",
    )  # fmt: skip

    def __init__(self, program_scheduler: ProgramScheduler, view: EngineView) -> None:
        self._program_scheduler = program_scheduler
        self._state = program_scheduler.state
        self._view = view

    def call(self, operation: str, payload: str, now: float) -> str:
        """Carry out one operation; returns JSON. Raises ``WireError``."""
        try:
            if operation == "event_batches":
                batches = [wire_codec.decode_batch(bytes(each)) for each in _batches.decode(payload)]
                answer: Any = [
                    OutcomeBatch(outcomes=[self._apply(each.emitter, raw, now) for raw in each.events])
                    for each in batches
                ]
            elif operation in self.OPERATIONS:
                answer = getattr(self, f"_{operation}")(_arguments.decode(payload or "{}"), now)
            else:
                raise WireError(f"unknown operation {operation!r}; expected {', '.join(self.OPERATIONS)}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise WireError(f"{operation}: invalid arguments: {error}") from error
        return wire_codec.encode(answer).decode()

    def apply_attached_events(self, identity: RequestIdentity, now: float) -> list[EventOutcome]:
        """Handle the first ``MAX_ATTACHED_EVENTS`` events attached to a request, and return their outcomes.
        Events without a valid emitter id are ignored. Call this method before the scheduler handles the
        request's ``RequestArrived``."""
        ours = identity.context.sojourn if identity.context is not None else None
        if ours is None or not ours.events or not ours.emitter or id_problem(ours.emitter) is not None:
            return []
        return [self._apply(ours.emitter, raw, now) for raw in ours.events[:MAX_ATTACHED_EVENTS]]

    def _apply(self, emitter: str, raw: msgspec.Raw, now: float) -> EventOutcome:
        """Pass an event to the scheduler. An event that cannot be decoded is only counted."""
        try:
            event = wire_codec.decode_event(raw)
        except WireError as error:
            kind, outcome = undecodable_outcome(raw, str(error))
        else:
            kind = str(event.__struct_config__.tag)
            answer = self._view.handle(ClientEventReceived(emitter, event), now)[-1]
            assert isinstance(answer, EventOutcome)
            outcome = answer
        self._state.recorder.count("sojourn_events_total", type=kind, outcome=outcome.outcome.value)
        return outcome

    def _capabilities(self, arguments: _Arguments, now: float) -> answers.Capabilities:
        preset = self._state.preset
        return answers.Capabilities(
            wire=[WIRE_VERSION],
            policy=preset.name,
            events=list(EVENT_TYPES),
            unused_hints=unused_fields(preset),
            engine=dict(self._view.engine),
            tiers=self._view.below_device(),
            missing=self._view.missing,
            paths=self._view.paths.capabilities(),
        )

    def _policy(self, arguments: _Arguments, now: float) -> answers.PolicyState:
        if arguments.on is not None:
            self._view.handle(PolicySwitched(arguments.on), now)
        return answers.PolicyState(self._state.preset.name, self._program_scheduler.own_preset.name)

    def _programs(self, arguments: _Arguments, now: float) -> answers.ProgramList:
        programs, status = self._state.programs, self._program_scheduler.status
        chosen = [one for one in programs if arguments.status in (None, status(one).value)]
        chosen.sort(key=lambda program: -program.rank)
        shown = [self._row(program, ProgramSummary) for program in chosen[: arguments.limit]]
        return answers.ProgramList(now_s=now, programs=shown, shown=len(shown), total=len(chosen))

    def _program(self, arguments: _Arguments, now: float) -> answers.ProgramDetail | None:
        state, program = self._state, self._state.programs.get(ProgramId(arguments.program_id))
        if program is None:
            return None
        compute_s = state.reload.seconds if state.reload.known else None
        live = [request.record for request in self._requests_of(program) if request.record is not None]
        live.sort(key=lambda record: record.arrived_s)
        limit_s, reads_ttl = state.limits.max_hinted_ttl_s, HINTED_TTL not in unused_fields(state.preset)
        return self._row(
            program,
            answers.ProgramDetail,
            **_same(program, "outcome agent_type node graph_hash expected_steps_left"),
            tools_running=len(program.tools),
            ledger=[turn.as_dict(compute_s) for turn in state.ledger.of_program(program.id)],
            unfinished=[replace(record, finished_s=now).as_dict(compute_s) for record in live],
            decisions=[one.as_dict() for one in state.decisions.of_program(program.id)],
            decisions_since_s=state.decisions.oldest_s,
            now_s=now,
            max_hinted_ttl_s=min(limit_s, MAX_TTL_S) if reads_ttl else None,
            max_hinted_ttl_from="--sojourn-max-ttl-s" if limit_s < MAX_TTL_S else "the policy's maximum",
        )

    def _load(self, arguments: _Arguments, now: float) -> answers.EngineLoad:
        state, blocks, requests = self._state, self._view.pool_state(), self._state.requests.states.values()
        per_block = state.pool.tokens_per_block
        programs: list[answers.ResidentProgram] = []
        waiting: list[str] = []
        for program in sorted(state.programs, key=lambda one: one.last_contact_s, reverse=True):
            if program.status in OVER_STATUSES:
                continue
            own = self._requests_of(program)
            if self._program_scheduler.tiers.placed(program.id) is Tier.WAITING:
                waiting += [program.id] if own else []
                continue
            runs, context_tokens = any(one.running for one in own), program.context_tokens
            found = len(state.owners.blocks.get(program.id, ())) + sum(self._view.below_blocks(program.id))
            # A context that fills no block counts as there, since nothing of it is kept.
            is_whole = runs or found >= int(context_tokens / per_block)
            tokens = context_tokens if is_whole else int(found * per_block)
            if tokens or runs:
                idle_s = round(max(0.0, now - program.last_contact_s), 3)
                # By the client's hint, corrected by what such hints were worth.
                known = state.histories.steps_left.turns_left(program, agent_type_name(program))
                left = program.expected_steps_left
                if known is not None:
                    left = round(known[0], 3)
                elif left is not None:
                    left += len(own)
                programs.append(answers.ResidentProgram(program.id, tokens, context_tokens, idle_s, left))
        return answers.EngineLoad(
            requests=len(requests),
            request_tokens=sum(one.prompt_tokens for one in requests),
            free_tokens=int((blocks["cached"] + blocks["free"]) * per_block),
            programs=programs,
            waiting=waiting,
            **pair_load(self._view.paths),
        )

    def _persist(self, arguments: _Arguments, now: float) -> answers.PersistProgress | None:
        program = self._state.programs.get(ProgramId(arguments.program_id))
        if program is None:
            return None
        hashes = self._state.contexts.get(program.id) or ()
        progress, block_size = self._view.persist(hashes), self._state.pool.block_size
        reason = progress.get("reason")
        if not hashes and program.status in OVER_STATUSES:
            reason = reason or f"the program has {program.status.value}, and its KV was dropped"
        stored, pending = progress.get("stored_blocks", 0), progress.get("pending_blocks", 0)
        reload = self._state.reload
        return answers.PersistProgress(
            program_id=program.id,
            state="writing" if pending else "unsupported" if reason and not stored else "done",
            reason=reason,
            **_same(program, "turns context_tokens"),
            stored_tokens=stored * block_size,
            pending_tokens=pending * block_size,
            compute_s=reload.seconds(program.context_tokens) if reload.known else None,
        )

    def _stats(self, arguments: _Arguments, now: float) -> answers.EngineStats:
        placed, forecaster = self._program_scheduler.tiers.counts(), self._program_scheduler.forecaster
        network_off, without_off = forecaster.prediction_errors
        return self._engine_row(
            answers.EngineStats,
            now,
            tiers=self._view.tier_state(),
            paths=self._view.paths.stats(),
            placed={tier.value: count for tier, count in placed.items()},
            output_lengths={
                "outputs": self._state.histories.output_lengths.count(),
                "network_off": network_off,
                "without_off": without_off,
                "network": self._view.network_state(),
            },
        )

    def _snapshot(self, arguments: _Arguments, now: float) -> EngineSnapshot:
        """The engine's numbers, and a row for each of at most ``limit`` programs, latest contact first: those
        with a request, a lease or contact within ``changed_within_s``; all if that is absent."""
        state, within_s, started_s = self._state, arguments.changed_within_s, time.thread_time()
        chosen = [
            program
            for program in state.programs
            if within_s is None
            or program.last_contact_s >= now - within_s
            or program.live_requests
            or program.id in state.leases
        ]
        chosen.sort(key=lambda program: program.last_contact_s, reverse=True)
        tiers = self._view.tier_state()
        rows = [self._row(program, ProgramRow) for program in chosen[: arguments.limit]]
        engine = self._engine_row(
            EngineRow,
            now,
            tiers={tier: dict(tiers[tier]) for tier in ("host", "disk") if tier in tiers},
            spent_s=round(time.thread_time() - started_s, 6),
        )
        full = within_s is None and len(rows) == len(chosen)
        return EngineSnapshot(engine=engine, programs=rows, total=len(state.programs), full=full)

    def _engine_row(self, kind: type[_Engine], now: float, **more: Any) -> _Engine:
        state, totals = self._state, self._state.ledger.totals
        return kind(
            engine="0",
            now_s=now,
            policy=state.preset.name,
            block_tokens=state.pool.tokens_per_block,
            block_bytes=state.pool.block_bytes,
            blocks={name: count for name, count in self._view.pool_state().items() if name != "total"},
            programs=self._by_status(),
            requests=len(state.requests.states),
            running_requests=sum(request.running for request in state.requests.states.values()),
            leases=len(state.leases),
            forgotten=state.programs.forgotten,
            **_same(state.reload, "mean_running prefill_share"),
            **_same(totals, "turns prompt_tokens device_tokens host_tokens new_tokens tail_tokens"),
            **_same(totals, "output_tokens lost_tokens"),
            preempted_tokens=totals.recomputed_after_preemption_tokens,
            grants_leases=type(state.preset.retention) is not RetentionPolicy,
            untracked_requests=state.requests.untracked_arrivals,
            **more,
        )

    def _decisions(self, arguments: _Arguments, now: float) -> answers.DecisionPage:
        chosen, following = self._state.decisions.since(arguments.since, arguments.limit or 1000)
        return answers.DecisionPage(decisions=[decision.as_dict() for decision in chosen], next=following)

    def _drain_metrics(self, arguments: _Arguments, now: float) -> dict[str, Any]:
        state, recorder = self._state, self._state.recorder
        device = {name: blocks for name, blocks in self._view.pool_state().items() if name != "total"}
        tiers = self._view.tier_state()
        traffic = tiers.pop("traffic", None)
        for what, total in tiers.pop("moves", {}).items():
            recorder.count_total("sojourn_tier_moves_total", total, what=what)
        build = {
            "version": version("sojourn"),
            "vllm": self._view.engine.get("vllm", "unknown"),
            "preset": state.preset.name,
            "adapter": "active",
        }
        placed = self._program_scheduler.tiers.counts().items()
        gauges: dict[str, list[tuple[dict[str, str], float]]] = {
            "sojourn_programs": [({"state": name}, count) for name, count in self._by_status().items()],
            "sojourn_leases": [({}, len(state.leases))],
            "sojourn_placed_programs": [({"tier": tier.value}, count) for tier, count in placed],
            "sojourn_build_info": [(build, 1)],
            "sojourn_kv_blocks": list(_by_state("device", device, 1)),
            "sojourn_kv_bytes": list(_by_state("device", device, state.pool.block_bytes)),
            "sojourn_tier_blocks": [row for tier, of in tiers.items() for row in _by_state(tier, of, 1)],
        }
        if traffic:
            for lane, total in traffic["moved_bytes"].items():
                recorder.count_total("sojourn_tier_bytes_total", total, lane=lane)
            for lane, total in traffic["seconds"].items():
                recorder.count_total("sojourn_tier_seconds_total", total, lane=lane)
            recorder.count_total("sojourn_tier_wait_seconds_total", traffic["waited_s"])
            gauges["sojourn_tier_jobs"] = [({}, traffic["jobs"])]
        gauges |= count_links(recorder, self._view.paths.stats())
        return recorder.drain(gauges)

    def _row(self, program: ProgramState, kind: type[_Summary], **more: Any) -> _Summary:
        lease, tier = self._state.leases.get(program.id), self._program_scheduler.tiers.placed(program.id)
        host_blocks, disk_blocks = self._view.below_blocks(program.id)
        requests = self._requests_of(program)
        since_s = min((request.arrived_s for request in requests), default=program.last_active_s)
        return kind(
            **_same(program, "tenant turns context_tokens reused_tokens lost_tokens"),
            program_id=program.id,
            status=self._program_scheduler.status(program).value,
            name=program.name or program.agent_type,
            parent_program_id=program.parent_id,
            requests=len(requests),
            tool=program.tool_now(),
            since_s=round(since_s, 3),
            running=any(request.running for request in requests),
            placed=tier.value if tier is not None else None,
            device_blocks=len(self._state.owners.blocks.get(program.id, ())),
            lease_blocks=lease.blocks if lease is not None else 0,
            lease_until_s=round(lease.deadline_s(), 3) if lease is not None else None,
            lease_reason=lease.reason.value if lease is not None else None,
            saved_s=round(program.saved_s, 3),
            ttft_s=None if program.ttft_s is None else round(program.ttft_s, 3),
            host_blocks=host_blocks,
            disk_blocks=disk_blocks,
            tool_ended=program.gap_reported and not program.tools,
            **more,
        )

    def _by_status(self) -> dict[str, int]:
        """Number of programs by status."""
        counts = Counter(map(self._program_scheduler.status, self._state.programs))
        return {status.value: counts[status] for status in ProgramStatus}

    def _requests_of(self, program: ProgramState) -> list[RequestState]:
        """The program's requests in the engine."""
        return [*filter(None, map(self._state.requests.states.get, program.live_requests))]


def stock_answer(
    operation: str, paths: KVTransferStatus, engine: dict[str, str], recorder: MetricsRecorder
) -> str:
    """Carry out one of ``STOCK_OPERATIONS`` for an engine of a prefill/decode pair with vLLM's own scheduler;
    returns JSON. The answer to any other operation is an error with the names of these. ``engine``: the entry
    ``engine`` of the answer to ``capabilities``."""
    stats = paths.stats()
    answer: Any = {"error": "stock", "answers": STOCK_OPERATIONS}
    if operation == "capabilities":
        about = paths.capabilities()
        answer = answers.Capabilities(name="vllm", wire=[], policy="stock", engine=engine, paths=about)
    elif operation == "stats":
        answer = answers.EngineStats(engine="0", now_s=0.0, policy="stock", paths=stats)
    elif operation == "load":
        answer = answers.EngineLoad(complete=False, **pair_load(paths))
    elif operation == "drain_metrics":
        answer = recorder.drain(count_links(recorder, stats))
    return wire_codec.encode(answer).decode()


def pair_load(paths: KVTransferStatus) -> dict[str, Any]:
    """Return the fields ``links`` and ``epoch`` of an ``EngineLoad``; empty if the engine is in no pair."""
    capabilities, stats = paths.capabilities(), paths.stats()
    if capabilities is None or stats is None:
        return {}
    return {"epoch": capabilities["epoch"], "links": stats.get("links", {})}


def _same(source: Any, names: str) -> dict[str, Any]:
    """Attributes of ``source`` that an answer has under the same names."""
    return {name: getattr(source, name) for name in names.split()}


def _by_state(tier: str, states: dict[str, int], factor: int) -> Iterator[tuple[dict[str, str], float]]:
    """The rows of a gauge of a tier's blocks by state, each multiplied by ``factor``."""
    return (({"tier": tier, "state": state}, blocks * factor) for state, blocks in states.items())
