"""A fake engine in virtual time around the real ``ProgramScheduler`` and ``EngineService``.

The engine has only a prefix cache of chained block hashes, and no scheduler of its own. The test says when
requests arrive, are admitted and finish, when blocks are evicted, and how much time passes. The engine
carries out actions at once and records them in ``done``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import msgspec
from scheduler_driver import SchedulerDriver
from sojourn.ids import ProgramId
from sojourn.wire_codec import WIRE_VERSION, EventOutcome, OutcomeBatch
from sojourn.wire_events import Event
from sojourn_server.core.engine_service import EngineService, EngineView
from sojourn_server.core.events_and_actions import (
    Action,
    EngineAction,
    EngineActionKind,
    LeaseGranted,
    LoadAheadChosen,
    PrefetchStarted,
    RequestAdmitted,
    RequestArrived,
    TurnFinished,
    TurnFinishReason,
    answer_of,
)
from sojourn_server.core.events_and_actions import Event as EngineEvent
from sojourn_server.core.leases import Lease, LeaseTable
from sojourn_server.core.request_hints import CONTEXT_KEY, read_identity
from sojourn_server.core.request_table import RequestState
from sojourn_server.core.scheduler_state import Histories, KVPoolConfig, SchedulerLimits, SchedulerState
from sojourn_server.metrics.turn_ledger import EvictedBlock, LossCause
from sojourn_server.policies.costs.engine_profile import PrefillCurve
from sojourn_server.policies.preset import Preset, load_preset
from sojourn_server.programs.program_state import ProgramState
from sojourn_server.programs.program_status import ProgramStatus
from sojourn_server.programs.tool_call_parsers import parse_tool_calls, plan_items

BLOCK_TOKENS = 4
BASH = "Let us see.\n```bash\npytest -q\n```"
"""A model output that calls a tool; the key of the tool is ``TOOL``."""
TOOL = "bash:pytest"


class VirtualEngine(EngineView):
    """One engine with ``blocks`` blocks of ``BLOCK_TOKENS`` tokens. ``now`` is the virtual time in seconds.
    The recorder is strict: metrics that are not in the catalogue raise."""

    def __init__(
        self,
        preset: str | Preset = "fixed-ttl",
        *,
        blocks: int = 1000,
        limits: SchedulerLimits | None = None,
        curve: PrefillCurve | None = None,
        histories: Histories | None = None,
    ) -> None:
        self.now = 1000.0
        state = SchedulerState(
            load_preset(preset) if isinstance(preset, str) else preset,
            KVPoolConfig(blocks=blocks, block_size=BLOCK_TOKENS, block_bytes=64),
            limits=limits,
            curve=curve,
            histories=histories,
        )
        self.program_scheduler = SchedulerDriver(state)
        self.program_scheduler.recorder.strict = True
        self.engine = {"virtual": "1"}
        self.service = EngineService(self.program_scheduler, self)
        self.cached: set[int] = set()
        self.held: dict[ProgramId, Sequence[int]] = {}
        self.done: list[EngineAction] = []
        self.in_host: set[int] = set()
        """Blocks that host memory has."""
        self.spare_blocks = 0
        """Number of blocks into which a prefetch may load."""
        self.loaded_ahead: list[tuple[ProgramId, int]] = []
        """Program and number of blocks of each load by a prefetch. Loads are done at once."""
        self._prompts: dict[str, list[int]] = {}
        self._increments: dict[str, list[Any]] = {}
        self._requests = 0
        self._seq = 0

    # -- time ---------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Advance the virtual time by ``seconds``, then begin a step."""
        self.now += seconds
        self.step()

    def step(self) -> None:
        """Begin an engine step at the current virtual time."""
        self.program_scheduler.tick(self.now)
        self.carry_out()

    # -- requests -------------------------------------------------------------------

    def arrive(self, program: str | None, tokens: Sequence[int], **hint: Any) -> str:
        """Let a request with the prompt ``tokens`` arrive, and return its id. ``program`` is the id of its
        program; ``None`` for an untracked request. ``hint`` has fields of its agentic context."""
        self._requests += 1
        request_id = f"r{self._requests}"
        context = {"program_id": program, **hint}
        xargs = {CONTEXT_KEY: json.dumps(context)} if program and hint else None
        identity = read_identity(program, xargs)
        self.service.apply_attached_events(identity, self.now)
        self._prompts[request_id] = list(tokens)
        hashes = chain(tokens) if program and identity.context is None else None
        self.program_scheduler.arrived(
            RequestArrived(request_id, identity, prompt_tokens=len(tokens), block_hashes=hashes), self.now
        )
        self.carry_out()
        return request_id

    def admit(self, request_id: str, *, resumed: bool = False) -> int:
        """Admit the request, and return the number of its tokens found in the cache. ``resumed`` is True
        after a preemption."""
        prompt = self._prompts[request_id]
        hashes = chain(prompt)
        hit = 0
        for block in hashes[: (len(prompt) - 1) // BLOCK_TOKENS]:
            if block not in self.cached:
                break
            hit += BLOCK_TOKENS
        self.handle(
            RequestAdmitted(
                request_id=request_id,
                cached_tokens=hit,
                tokens=len(prompt),
                block_hashes=hashes,
                resumed=resumed,
                most_tokens=10_000,
            ),
            self.now,
        )
        self.cached.update(hashes)
        self.carry_out()
        return hit

    def finish(
        self,
        request_id: str,
        text: str = BASH,
        *,
        output: Sequence[int] = (7, 7),
        outcome: TurnFinishReason = TurnFinishReason.STOPPED,
    ) -> Lease | None:
        """Finish the request with the output ``text``, encoded as the tokens ``output``. Returns the lease
        that its program gets, or ``None``."""
        prompt = self._prompts.pop(request_id)
        hashes = chain([*prompt, *output])
        failed = outcome in (TurnFinishReason.ABORTED, TurnFinishReason.ERROR)
        if not failed:
            self.cached.update(hashes)
        calls = () if failed else parse_tool_calls(text)
        lease = self.program_scheduler.finished(
            TurnFinished(
                request_id=request_id,
                outcome=outcome,
                tool_calls=calls,
                prompt_tokens=len(prompt),
                output_tokens=len(output),
                block_ids=() if failed else list(dict.fromkeys(hashes)),
                block_hashes=hashes,
                plan_items=plan_items(calls),
            ),
            self.now,
        )
        self.carry_out()
        return lease

    def turn(self, program: str | None, tokens: Sequence[int], text: str = BASH, **hint: Any) -> Lease | None:
        """Let a request arrive, be admitted and finish at the current time. Returns the granted lease, or
        ``None``."""
        request_id = self.arrive(program, tokens, **hint)
        self.admit(request_id)
        self.program_scheduler.first_token(request_id, self.now)
        return self.finish(request_id, text)

    def evict(self, tokens: Sequence[int], *, by: str | None = None, keep: int = 0) -> None:
        """Evict the cached blocks of ``tokens``, except the first ``keep`` blocks. ``by`` is the id of the
        program whose request takes them, if known."""
        for block in chain(tokens)[keep:]:
            if block in self.cached:
                self.cached.discard(block)
                self.program_scheduler.owners.remove_evicted([block])
                evicted = EvictedBlock(LossCause.EVICTED, by)
                self.program_scheduler.state.eviction_log.add([block], evicted)

    # -- clients --------------------------------------------------------------------

    def send(self, *events: Event, emitter: str = "e") -> list[EventOutcome]:
        """Post a batch of events, and return their outcomes. An event with a negative ``seq`` gets the next
        sequence number."""
        numbered = []
        for event in events:
            if event.seq < 0:
                self._seq += 1
                event = msgspec.structs.replace(event, seq=self._seq)
            numbered.append(json.loads(msgspec.json.encode(event)))
        return self.post({"v": WIRE_VERSION, "emitter": emitter, "events": numbered})

    def post(self, batch: dict[str, Any]) -> list[EventOutcome]:
        """Post a batch in the wire format, unchanged, and return the outcomes of its events."""
        answer = self.service.call("event_batches", json.dumps([batch]), self.now)
        self.carry_out()
        return msgspec.json.decode(answer, type=list[OutcomeBatch])[0].outcomes

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Return the answer that the API server would get for ``operation``."""
        return json.loads(self.service.call(operation, json.dumps(arguments), self.now))

    # -- the engine's side -----------------------------------------------------------

    def carry_out(self) -> None:
        """Carry out the actions of the ``ProgramScheduler``, and add those on KV to ``done``."""
        while self.program_scheduler.actions:
            for action in self.program_scheduler.take_actions():
                if isinstance(action, LeaseGranted):
                    self.held[action.program_id] = action.block_ids
                    continue
                self.done.append(action)
                if action.kind is EngineActionKind.PREFETCH:
                    self._prefetch(action.program_id)
                    continue
                held = self.held.pop(action.program_id, ())
                if action.kind is EngineActionKind.DROP:
                    self.cached.difference_update(held)

    def _prefetch(self, program_id: ProgramId) -> None:
        """Load at once the part of a program's expected prefix that the policy chooses."""
        keys = self.program_scheduler.prefetch_keys(program_id)
        missing = [block for block in keys if block not in self.cached]
        ready = [*takewhile(self.in_host.__contains__, missing)]
        lost = sum(block not in self.in_host for block in missing)
        tiers = (0, lost, len(ready), self.spare_blocks) if self.in_host else ()
        event = PrefetchStarted(program_id, len(missing), *tiers)
        load = answer_of(self.handle(event, self.now), LoadAheadChosen)
        if load is not None:
            self.cached.update(ready[: load.blocks])
            self.loaded_ahead.append((program_id, load.blocks))

    def pool_state(self) -> dict[str, int]:
        """Return the number of blocks in each state, as the real engine reports them."""
        leased = sum(len(blocks) for blocks in self.held.values())
        cached = len(self.cached) - leased
        total = self.program_scheduler.pool.blocks
        return {
            "total": total,
            "running": 0,
            "leased": leased,
            "cached": cached,
            "free": total - leased - cached,
        }

    def handle(self, event: EngineEvent, now: float) -> list[Action]:
        return self.program_scheduler.handle(event, now)

    # -- for assertions ---------------------------------------------------------------

    @property
    def leases(self) -> LeaseTable:
        return self.program_scheduler.state.leases

    def leased_turn(self, program: str, tokens: Sequence[int], text: str = BASH, **hint: Any) -> Lease:
        """Run a turn, and return the lease that it gets. Fails if it gets none."""
        lease = self.turn(program, tokens, text, **hint)
        assert lease is not None
        return lease

    def program(self, program_id: str) -> ProgramState:
        """Return the state of a program. Fails if the program is unknown."""
        program = self.program_scheduler.state.programs.get(ProgramId(program_id))
        assert program is not None
        return program

    def status(self, program_id: str) -> ProgramStatus:
        return self.program_scheduler.status(self.program(program_id))

    def request_state(self, request_id: str) -> RequestState:
        """Return the state of a request in the engine. Raises ``KeyError`` if it has left."""
        return self.program_scheduler.state.requests.states[request_id]

    def queue(self) -> list[str]:
        """Return the ids of all requests in the engine, by the preset's queue order."""
        place = self.program_scheduler.queue_place
        return sorted(self.program_scheduler.state.requests.states, key=lambda request: place(request).key)

    def reasons(self, kind: str) -> list[str]:
        """Return the reasons of all decisions of one kind, oldest first."""
        chosen, _ = self.program_scheduler.decisions.since(0, 100_000)
        return [decision.reason for decision in chosen if decision.kind == kind]

    def counter(self, name: str, **labels: str) -> float:
        """Return the sum of a counter since the start, over all its rows that have these labels."""
        for drained, rows in self.program_scheduler.recorder.drain()["counters"].items():
            self._increments.setdefault(drained, []).extend(rows)
        return sum(n for found, n in self._increments.get(name, ()) if found.items() >= labels.items())


def chain(tokens: Sequence[int]) -> list[int]:
    """Return the hash of each full block of ``tokens``. As in vLLM, a hash also covers the blocks before its
    block."""
    hashes: list[int] = []
    previous = 0
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        previous = hash((previous, *tokens[start : start + BLOCK_TOKENS]))
        hashes.append(previous)
    return hashes


def prompt(n: int, seed: int = 0) -> list[int]:
    """Return ``n`` tokens. Prompts with different ``seed`` have no common prefix."""
    return [seed * 1_000_003 + i for i in range(n)]
