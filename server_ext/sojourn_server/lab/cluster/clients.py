"""Clients whose requests go to one of several engines: by a router of its own, or by our routing core."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...gateway.core.facts import AnyAction, Left, Recall, Refuse, Send
from ..account import LiveTurn
from ..agenda import Agenda
from ..clients import HEARD, Clients, Playing, Sent, Site
from ..door import Door, DoorRequest, DoorView
from ..lives import RunLog
from ..workloads.loops import Loop
from ..workloads.players import ProgramPlan
from .expected import SLO_FACTOR
from .gateway import Gateway, prefix_of
from .stepper import Stepper

GATEWAY = "gateway"
"""Whose events an engine hears that no client has sent."""


class Router(Door, Protocol):
    """A door with several engines behind it."""

    def replica_of(self, program_id: str) -> int:
        """The engine, from 0, that the requests of a program go to which was just let in."""
        ...


class ClusterClients(Clients):
    """As before one engine, but that each request and event goes to the engine that its program is at."""

    def __init__(
        self,
        steppers: Sequence[Stepper],
        agenda: Agenda,
        loop: Loop,
        door: Door,
        log: RunLog,
        *,
        expected_s: Callable[[ProgramPlan], float],
        call_s: float = 0.0,
        with_hints: bool = False,
    ) -> None:
        first = steppers[0]
        super().__init__(
            first.engine, agenda, loop, door, first.account, log, call_s=call_s, with_hints=with_hints
        )
        self.mail: set[str] = set()
        """Engines that something has reached since they last looked."""
        self._steppers = {stepper.replica: stepper for stepper in steppers}
        self._expected_s = expected_s
        self._homes: dict[str, str] = {}
        """The engine that each program's last request was sent to."""
        self._moved: set[str] = set()
        """Programs that have been at home elsewhere: an engine may not know what their events are about."""
        self._attempts: dict[str, int] = {}
        """Of each request that has not been answered, how often it was sent to an engine before."""
        self._unsaid: dict[str, list[dict[str, Any]]] = defaultdict(list)
        """Events of programs that are at home nowhere yet; their first request takes them along."""
        self._tells = 0

    def _where(self, request_id: str) -> str:
        """The engine that a request goes to, which has just been let in."""
        raise NotImplementedError

    def first_token(self, turn: LiveTurn) -> None:
        """An answer has begun."""

    def saw(self, plan: ProgramPlan) -> str:
        """A program has ended before the run begins; returns what kind of agent it was."""
        kind = agent_type_of(plan)
        self._history.over(kind, len(plan.plans))
        return kind

    # -- programs -------------------------------------------------------------------

    def _opened(self, playing: Playing) -> None:
        playing.life.expected_s = self._expected_s(playing.plan)

    def answered(self, turn: LiveTurn) -> None:
        self._submitted.pop(turn.life.request_id)
        self._attempts.pop(turn.life.request_id, None)
        super().answered(turn)

    def _gone(self, playing: Playing) -> None:
        super()._gone(playing)
        if playing.hints is None:  # else its last event needs it
            self._forget(playing.plan.instance_id)

    def _forget(self, program_id: str) -> None:
        self._homes.pop(program_id, None)
        self._unsaid.pop(program_id, None)

    # -- requests -------------------------------------------------------------------

    def _enter(self, request_id: str) -> None:
        sent = self._submitted[request_id]
        program_id = sent.life.program_id
        replica = self._where(request_id)
        if self._homes.get(program_id, replica) != replica:
            self._moved.add(program_id)
        self._homes[program_id] = sent.life.replica = replica
        attempt = self._attempts.setdefault(request_id, 0)
        sent.playing.state, sent.playing.since_s = "reasoning", self._agenda.now_s
        self._on_arrival(lambda: self._reached(request_id, attempt, replica))

    def _reached(self, request_id: str, attempt: int, replica: str) -> None:
        if self._is_withdrawn(request_id, attempt):
            return
        sent = self._submitted[request_id]
        now = sent.life.entered_s = self._agenda.now_s

        def taken_in() -> None:
            if not self._is_withdrawn(request_id, attempt):
                self._taken_in(self._steppers[replica], _name(request_id, attempt), sent, now)

        self._post(replica, taken_in)

    def _taken_in(self, site: Site, request_id: str, sent: Sent, now: float) -> None:
        waited = self._unsaid.pop(sent.life.program_id, None)
        if waited:
            self._tell(site, waited)
        # They ride but once: a request that is sent again has told them.
        riding = sent.events if request_id == sent.life.request_id else []
        super()._taken_in(site, request_id, sent._replace(events=riding), now)

    def _take_back(self, request_id: str) -> None:
        """A request that has not begun to be answered leaves its engine, and waits again."""
        sent = self._submitted[request_id]
        attempt = self._attempts[request_id]
        self._attempts[request_id] = attempt + 1
        replica = sent.life.replica
        assert replica is not None
        turn = self._steppers[replica].withdraw(_name(request_id, attempt))
        if turn is not None:
            self.outputs.forget(turn.request.output_token_ids)
            self.mail.add(replica)
        sent.life.entered_s = sent.life.admitted_s = None
        sent.life.recalls += 1
        sent.playing.state, sent.playing.since_s = "waiting", self._agenda.now_s

    def _is_withdrawn(self, request_id: str, attempt: int) -> bool:
        return self._attempts.get(request_id) != attempt

    # -- events ---------------------------------------------------------------------

    def _heard(self, events: list[dict[str, Any]]) -> None:
        program_id = events[0]["program_id"]
        replica = self._homes.get(program_id)
        if replica is None:
            self._unsaid[program_id] += events
            return
        self._post(replica, lambda: self._tell(self._steppers[replica], events))
        if any(event["type"] == "program_end" for event in events):
            self._forget(program_id)

    def _tell(self, site: Site, events: list[dict[str, Any]]) -> None:
        for outcome in site.engine.tell(*events, emitter="lab") if events else ():
            # Who comes from elsewhere had its tool announced there.
            told = outcome["outcome"] == "missing" and outcome.get("program_id") in self._moved
            if outcome["outcome"] not in HEARD and not told:
                self._log.refused_hints += 1

    def _leave(self, program_id: str, replica: str) -> None:
        """The engine where a program was hears that it will not come back for what is kept there."""
        if not self._with_hints:
            return
        self._tells += 1
        # Cancelled: it teaches nobody how long such programs are.
        event = {"type": "program_end", "program_id": program_id, "seq": self._tells, "status": "cancelled"}

        def told() -> None:
            self._steppers[replica].engine.tell(event, emitter=GATEWAY)

        self._on_arrival(lambda: self._post(replica, told))

    def _post(self, replica: str, what: Callable[[], None]) -> None:
        self._steppers[replica].inbox.append(what)
        self.mail.add(replica)


class RoutedClients(ClusterClients):
    """Behind a router of its own, which knows every program by what goes through it."""

    def __init__(self, steppers: Sequence[Stepper], agenda: Agenda, loop: Loop, door: Router, log: RunLog,
                 **more: Any) -> None:  # fmt: skip
        super().__init__(steppers, agenda, loop, door, log, **more)
        self._router = door
        self._names = [stepper.replica for stepper in steppers]

    def _where(self, request_id: str) -> str:
        return self._names[self._router.replica_of(self._submitted[request_id].life.program_id)]


class CoreDoor:
    """In place of a router: the core is told of each request, and not shown all of them."""

    is_open = False

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s

    def let_in(self, view: DoorView, now: float) -> Sequence[str]:
        """Never asked."""
        raise NotImplementedError


class GatewayClients(ClusterClients):
    """Behind our gateway's routing core."""

    def __init__(self, steppers: Sequence[Stepper], agenda: Agenda, loop: Loop, gateway: Gateway, log: RunLog,
                 **more: Any) -> None:  # fmt: skip
        super().__init__(steppers, agenda, loop, CoreDoor(gateway.tick_s), log, **more)
        self._gateway = gateway
        self._bound: dict[str, str] = {}

    def begin(self) -> None:
        for stepper in self._steppers.values():
            self._do(self._gateway.seen(stepper.replica, stepper.engine.options, self._agenda.now_s))
        super().begin()

    def first_token(self, turn: LiveTurn) -> None:
        assert turn.life.replica is not None
        self._do(self._gateway.began(turn.life.request_id, turn.life.replica, self._agenda.now_s))

    def answered(self, turn: LiveTurn) -> None:
        # The core hears of it first: whatever the client does next finds the room.
        life = turn.life
        replica = self._bound.pop(life.request_id)
        self._do(self._gateway.ended(life.request_id, replica, life.output_tokens, self._agenda.now_s))
        super().answered(turn)

    def _where(self, request_id: str) -> str:
        return self._bound[request_id]

    def _come(self, request: DoorRequest) -> None:
        playing = self._submitted[request.request_id].playing
        plan, life = playing.plan, playing.life
        deadline_s = None
        if plan.tenant is not None and life.expected_s is not None:
            deadline_s = life.arrived_s + SLO_FACTOR * life.expected_s
        prefix: tuple[int, ...] = ()
        if self._gateway.reads_prefixes:
            prefix = prefix_of(self._submitted[request.request_id].prompt)
        self._do(
            self._gateway.asked(
                request,
                parent_id=life.parent,
                agent_type=agent_type_of(plan, is_child=life.parent is not None),
                tenant=plan.tenant,
                deadline_s=deadline_s,
                prefix=prefix,
                now=self._agenda.now_s,
            )
        )

    def _tick(self) -> None:
        self._do(self._gateway.tick(self._agenda.now_s))
        super()._tick()

    def _ask_door(self, over: Playing | None = None) -> None:
        if over is not None:
            plan = over.plan
            self._do(self._gateway.program_over(plan.instance_id, plan.tenant, self._agenda.now_s))

    def _do(self, actions: Sequence[AnyAction]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._bound[action.request_id] = action.replica_id
                self._enter(action.request_id)
            elif isinstance(action, Refuse):
                self._refused(action)
            elif isinstance(action, Left):
                self._leave(action.program_id, action.replica_id)
            elif isinstance(action, Recall):
                self._take_back(action.request_id)
            else:
                raise AssertionError(f"{action}: nobody dies or falls silent in the lab")

    def _refused(self, refusal: Refuse) -> None:
        """A program whose request is refused gives up."""
        sent = self._submitted.pop(refusal.request_id)
        self._log.notes.append(f"{refusal.request_id} was refused: {refusal.message}")
        self._gone(sent.playing)


def agent_type_of(plan: ProgramPlan, *, is_child: bool = False) -> str:
    """What a client says its program is, where the trace does not."""
    return plan.agent_type or ("sub-agent" if is_child else "agent")


def _name(request_id: str, attempt: int) -> str:
    """What an engine calls a request: one that was taken back may still be on its way out."""
    return request_id if not attempt else f"{request_id}~{attempt}"
