"""The clients' side: programs that come and go, their tools, their events, and the router they go through.

What a program will do next is known here and nowhere else. A server is told what
a client would tell it, when it would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .account import Account, LiveTurn
from .agenda import Agenda
from .bare_engine import BareEngine
from .client_history import ClientHistory
from .door import Door, DoorProgram, DoorRequest, DoorView
from .hints import UNSENT_FOR_S, Hints
from .lives import ProgramLife, RunLog, TurnLife
from .outputs import Outputs
from .workloads.loops import Loop
from .workloads.players import ProgramPlan

HEARD = ("applied", "deferred")
"""Outcomes of events that did what they say; a ``tool_start`` may come after its request, as on a network."""


@dataclass(slots=True)
class Playing:
    """A program that runs."""

    plan: ProgramPlan
    life: ProgramLife
    root: Playing | None
    hints: Hints | None
    turn: int = 0
    family: int = 1
    """Of a root: programs of its family that still run, itself included."""
    children: list[ProgramPlan] = field(default_factory=list)
    hashes: list[Any] = field(default_factory=list)
    """Of the blocks its last turn left."""
    state: str = "waiting"
    since_s: float = 0.0
    context_tokens: int = 0


class Site:
    """An engine as clients meet it: what has reached it waits until it looks, between two of its steps."""

    def __init__(self, engine: BareEngine, account: Account) -> None:
        self.engine = engine
        self.account = account
        self.inbox: deque[Callable[[], None]] = deque()

    def deliver(self) -> None:
        """The engine takes in what has reached it, in that order: to be called before each step, after the
        results of the one before."""
        while self.inbox:
            self.inbox.popleft()()


class Sent(NamedTuple):
    """A request on its way to an engine."""

    playing: Playing
    life: TurnLife
    prompt: list[int]
    known: list[Any]
    """Hashes of its leading blocks."""
    events: list[dict[str, Any]]
    """They ride along."""
    context: dict[str, Any] | None
    """Further fields of its hint."""


class Clients:
    """Everybody who sends requests. Times are those of the agenda."""

    def __init__(
        self,
        engine: BareEngine,
        agenda: Agenda,
        loop: Loop,
        door: Door,
        account: Account,
        log: RunLog,
        *,
        call_s: float = 0.0,
        with_hints: bool = False,
    ) -> None:
        self._site = Site(engine, account)
        self._agenda = agenda
        self._loop = loop
        self._door = door
        self._log = log
        self._call_s = call_s
        self._with_hints = with_hints
        self._history = ClientHistory()
        self.outputs = Outputs()
        self.playing: dict[str, Playing] = {}
        """Programs that have arrived and are not over."""
        self._at_door: dict[str, DoorRequest] = {}
        self._submitted: dict[str, Sent] = {}
        self._arrivals: Iterable[tuple[float, ProgramPlan]] = ()

    def begin(self) -> None:
        """Put the first arrival on the agenda."""
        self._arrivals = iter(self._loop.initial())
        self._next_arrival()
        if self._door.tick_s != float("inf"):
            self._tick()

    def deliver(self) -> None:
        """The engine takes in what has reached it; see ``Site``."""
        self._site.deliver()

    # -- programs -------------------------------------------------------------------

    def _next_arrival(self) -> None:
        """Only the next one is in the queue: an endless loop has no last."""
        arrival = next(iter(self._arrivals), None)
        if arrival is not None:
            at_s, plan = arrival

            def arrives() -> None:
                self._begin(plan, None)
                self._next_arrival()

            self._agenda.at(at_s, arrives)

    def _begin(self, plan: ProgramPlan, parent: Playing | None) -> None:
        now = self._agenda.now_s
        life = ProgramLife(
            program_id=plan.instance_id,
            trace_id=plan.trace_id,
            parent=parent.life.program_id if parent is not None else None,
            arrived_s=now,
            turns_total=len(plan.plans),
            cut=plan.cut,
            tenant=plan.tenant,
        )
        self._log.programs.append(life)
        hints: Hints | None = None
        if self._with_hints:
            kind = plan.agent_type or ("agent" if parent is None else "sub-agent")
            hints = Hints(plan.instance_id, life.parent, agent_type=kind, history=self._history)
        root = None if parent is None else parent.root or parent
        playing = Playing(plan, life, root, hints, since_s=now)
        if root is not None:
            root.family += 1
        self.playing[plan.instance_id] = playing
        self._opened(playing)
        if hints is not None:
            self._say(hints, hints.program_start())
        for child in plan.children:
            (root or playing).family += 1
            if child.parent_turn is None:
                starts_s = now + (child.start_offset_s or 0.0)
                self._agenda.at(starts_s, lambda child=child: self._begin_child(child, playing))
            else:
                playing.children.append(child)
        self._submit(playing)

    def _opened(self, playing: Playing) -> None:
        """A program begins, and has sent nothing yet."""

    def _submit(self, playing: Playing) -> None:
        now = self._agenda.now_s
        plan, turn = playing.plan, playing.turn
        lengths = plan.plans[turn]
        prompt = plan.prompt(turn)
        life = TurnLife(
            program_id=plan.instance_id,
            turn=turn,
            submitted_s=now,
            prompt_tokens=len(prompt),
            output_tokens=lengths.output_tokens,
            tool=plan.tool(turn),
        )
        playing.life.turns.append(life)
        playing.state, playing.since_s = "waiting", now
        request_id = life.request_id
        continues = lengths.base is not None and lengths.base == turn - 1
        known = (
            playing.hashes[: lengths.kept_tokens // self._site.engine.options.block_size] if continues else []
        )
        riding = playing.hints.take_unsent(now) if playing.hints is not None else []
        context = playing.hints.context() if playing.hints is not None else None
        self._submitted[request_id] = Sent(playing, life, prompt, known, riding, context)
        self._come(DoorRequest(request_id, plan.instance_id, len(prompt), now, turn))

    def _come(self, request: DoorRequest) -> None:
        """A request comes to the door."""
        if self._door.is_open:
            self._enter(request.request_id)
        else:
            self._at_door[request.request_id] = request
            self._ask_door()

    def _enter(self, request_id: str) -> None:
        """Send a request on to the engine, which it reaches after a call's time."""
        playing = self._submitted[request_id].playing
        playing.state, playing.since_s = "reasoning", self._agenda.now_s
        self._on_arrival(lambda: self._entered(request_id))

    def _on_arrival(self, what: Callable[[], None]) -> None:
        """What was sent first arrives first: requests and events take the same way."""
        if self._call_s:
            self._agenda.at(self._agenda.now_s + self._call_s, what)
        else:
            what()

    def _entered(self, request_id: str) -> None:
        sent = self._submitted.pop(request_id)
        now = sent.life.entered_s = self._agenda.now_s
        self._site.inbox.append(lambda: self._taken_in(self._site, request_id, sent, now))

    def _taken_in(self, site: Site, request_id: str, sent: Sent, now: float) -> None:
        playing, life, prompt, known, riding, context = sent
        self._tell(site, riding)
        turn = site.account.live[request_id] = LiveTurn(life, playing.plan.planned_output(life.turn))
        turn.request = site.engine.add(
            request_id,
            prompt,
            # As clients do: they cannot say how long an answer will be, so nobody may know.
            max_tokens=site.engine.options.max_model_len - len(prompt),
            program_id=playing.plan.instance_id if playing.hints is not None else None,
            context=context,
            arrival_s=now,
            known_hashes=known,
        )
        self.outputs.say(turn.request.output_token_ids, playing.plan.tool_runs(life.turn))

    def answered(self, turn: LiveTurn) -> None:
        """A request has its answer: its tools run, or its program is over."""
        now = self._agenda.now_s
        playing = self.playing[turn.life.program_id]
        playing.hashes = turn.hashes
        playing.context_tokens = turn.life.prompt_tokens + turn.life.output_tokens
        number = playing.turn
        for child in [c for c in playing.children if c.parent_turn == number]:
            playing.children.remove(child)
            self._agenda.at(now + child.delay_s, lambda child=child: self._begin_child(child, playing))
        playing.turn += 1
        if playing.turn >= len(playing.plan.plans):
            self._program_over(playing)
            return
        gap_s = playing.plan.gap_s(number)
        turn.life.gap_s = gap_s
        playing.state, playing.since_s = "acting", now
        if playing.hints is not None:
            self._announce_tools(playing, number, gap_s)
        self._agenda.at(now + gap_s, lambda: self._submit(playing))
        self._ask_door()

    def _begin_child(self, child: ProgramPlan, parent: Playing) -> None:
        (parent.root or parent).family -= 1  # it was counted when it was promised
        self._begin(child, parent)

    def _announce_tools(self, playing: Playing, number: int, gap_s: float) -> None:
        hints = playing.hints
        assert hints is not None
        runs = playing.plan.tool_runs(number)
        self._say(hints, *(hints.tool_start(f"{number}.{i}", run) for i, run in enumerate(runs)))
        for i, run in enumerate(runs):
            took_s = gap_s if run.s is None else min(run.s, gap_s)
            call_id = f"{number}.{i}"
            self._agenda.at(
                self._agenda.now_s + took_s,
                lambda call_id=call_id, took_s=took_s: self._say(hints, hints.tool_stop(call_id, took_s)),
            )

    def _program_over(self, playing: Playing) -> None:
        playing.life.finished_s = self._agenda.now_s
        self._gone(playing)

    def _gone(self, playing: Playing) -> None:
        """A program is over, or has given up."""
        now = self._agenda.now_s
        playing.state, playing.since_s = "over", now
        del self.playing[playing.plan.instance_id]
        if playing.hints is not None:
            self._say(playing.hints, playing.hints.program_end())
        root = playing.root or playing
        root.family -= 1
        if root.family == 0:
            following = self._loop.finished(root.plan, now)
            if following is not None:
                at_s, plan = following
                self._agenda.at(max(now, at_s), lambda: self._begin(plan, None))
        self._ask_door(over=playing)

    def _say(self, hints: Hints, *events: dict[str, Any]) -> None:
        """Something happens on a program's side; the server hears of it later."""
        now = self._agenda.now_s
        if events and hints.happened(events, now):
            self._agenda.at(now + UNSENT_FOR_S, lambda: self._send(hints))

    def _send(self, hints: Hints) -> None:
        events = hints.take_unsent(self._agenda.now_s)
        if events:  # else a request took them along meanwhile
            self._on_arrival(lambda: self._heard(events))

    def _heard(self, events: list[dict[str, Any]]) -> None:
        """Events of one program have reached the server."""
        self._site.inbox.append(lambda: self._tell(self._site, events))

    def _tell(self, site: Site, events: list[dict[str, Any]]) -> None:
        for outcome in site.engine.tell(*events, emitter="lab") if events else ():
            if outcome["outcome"] not in HEARD:
                self._log.refused_hints += 1

    # -- the router in front ----------------------------------------------------------

    def _tick(self) -> None:
        self._ask_door()
        self._agenda.at(self._agenda.now_s + self._door.tick_s, self._tick, background=True)

    def _ask_door(self, over: Playing | None = None) -> None:
        if self._door.is_open:
            return
        for request_id in self._door.let_in(self._door_view(over), self._agenda.now_s):
            if self._at_door.pop(request_id, None) is not None:
                self._enter(request_id)

    def _door_view(self, over: Playing | None) -> DoorView:
        engine = self._site.engine
        playing = list(self.playing.values()) + ([over] if over is not None else [])
        return DoorView(
            waiting=tuple(self._at_door.values()),
            programs=tuple(
                DoorProgram(
                    p.plan.instance_id, p.state, p.context_tokens, p.since_s, p.turn, p.life.arrived_s
                )
                for p in playing
            ),
            capacity_tokens=(engine.pool.num_gpu_blocks - 1) * engine.options.block_size,
            host_capacity_tokens=engine.options.host_blocks * engine.options.block_size,
        )
