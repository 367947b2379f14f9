"""Random walks of several tasks through nested blocks: each request and each start of a program says what a
naive model says."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import pytest
import sojourn
from sdk_records import context_of, told
from sojourn.program_scope import INHERIT
from sojourn.testing import FakeServer
from sojourn.wire_events import ProgramEnd, ProgramStart


@dataclass(eq=False)
class Known:
    """A program as the model knows it. ``outer`` is the place around its block."""

    real: sojourn.Program
    outer: Place
    parent_id: str | None
    root_id: str | None
    call_id: str | None
    tenant: str | None
    ended: bool = False

    def end(self) -> None:
        self.real.end()
        self.ended = True
        while self.outer.program is not None and self.outer.program.ended:
            self.outer = self.outer.program.outer


class Place(NamedTuple):
    """Program, hints of the steps and tool call around code."""

    program: Known | None
    hints: dict[str, Any]
    tool: Any


@dataclass
class Frame:
    """An entered block, and the place before it."""

    block: Any
    before: Place
    program: Known | None = None
    here: bool = False
    left: bool = False


class Walker:
    """A task, which may have begun inside the blocks of another one."""

    def __init__(self, began_in: Walker | None = None) -> None:
        around = contextvars.Context() if began_in is None else began_in.context
        self.context = around.copy()
        self.place: Place = Place(None, {}, None) if began_in is None else began_in.place
        self.inherited: list[Frame] = [] if began_in is None else [*began_in.inherited, *began_in.frames]
        self.frames: list[Frame] = []

    def live(self) -> Place:
        named = {frame.program for frame in (*self.inherited, *self.frames) if frame.here and not frame.left}
        place = self.place
        while place.program is not None and place.program.ended and place.program not in named:
            place = place.program.outer
        return place

    def enter(self, block: Any, inside: Place, program: Known | None = None, *, here: bool = False) -> None:
        self.frames.append(Frame(block, self.place, program, here))
        self.place = inside

    def enter_program(self, scope: Any, parent: Any, tenant: str | None) -> Known:
        outer = self.live()
        real = self.context.run(scope.__enter__)
        call_id = None
        if parent is INHERIT:
            parent, tool = outer.program, outer.tool
            call_id = tool.call_id if tool and tool.program is (parent and parent.real) else None
        if isinstance(parent, Known):
            root_id, tenant = parent.root_id or parent.real.id, tenant or parent.tenant
            parent = parent.real.id
        else:
            root_id = parent
        known = Known(real, outer, parent, root_id, call_id, tenant)
        self.enter(scope, Place(known, {}, None), known)
        return known

    def enter_here(self, known: Known, block: Any) -> None:
        self.context.run(block.__enter__)
        self.enter(block, Place(known, {}, None), known, here=True)

    def enter_step(self, hints: dict[str, Any]) -> None:
        live, block = self.live(), sojourn.step(**hints)
        self.context.run(block.__enter__)
        self.enter(block, live._replace(hints={**live.hints, **hints}))

    def enter_tool(self) -> None:
        live, call = self.live(), sojourn.tool_call("t")
        self.context.run(call.__enter__)
        self.enter(call, live._replace(tool=call))

    def leave(self) -> None:
        frame = self.frames.pop()
        self.context.run(frame.block.__exit__, None, None, None)
        frame.left, self.place = True, frame.before
        if frame.program is not None and not frame.here and not frame.program.ended:
            frame.program.end()

    def check(self) -> None:
        live = self.live()
        said = self.context.run(context_of)
        ours = said.sojourn
        assert ours is not None
        assert (ours.node, said.priority) == (live.hints.get("node"), live.hints.get("priority"))
        assert ours.expected_steps_left == live.hints.get("expected_steps_left")
        known = live.program
        assert self.context.run(sojourn.current_program) is (known and known.real)
        if known is None:
            assert ours.implicit
            return
        assert (said.program_id, ours.heartbeat) == (known.real.id, not known.ended)
        assert (said.parent_program_id, said.root_program_id) == (known.parent_id, known.root_id)
        assert ours.tenant == known.tenant


@pytest.mark.parametrize("seed", range(30))
def test_a_request_is_where_its_code_is(online: FakeServer, seed: int) -> None:
    random, walkers, programs = Random(seed), [Walker()], []
    scopes = [sojourn.program("shared") for _ in range(2)]
    blocks: dict[Known, Any] = {}
    for _ in range(150):
        walker = random.choice(walkers)
        match random.randrange(9):
            case 0 if len(walkers) < 5:
                walkers.append(Walker(walker))
            case 1:
                programs.append(walker.enter_program(random.choice(scopes), INHERIT, None))
            case 2:
                parent: Any = random.choice([INHERIT, INHERIT, None, "elsewhere", *programs[-2:]])
                tenant = random.choice((None, "red", "blue"))
                given = parent.real if isinstance(parent, Known) else parent
                scope = sojourn.program("own", parent=given, tenant=tenant)
                programs.append(walker.enter_program(scope, parent, tenant))
            case 3 if programs:
                known = random.choice(programs)
                walker.enter_here(known, blocks.setdefault(known, known.real.here()))
            case 4:
                node, left = random.choice((None, "a", "b")), random.choice((None, 1.5, 4.0))
                hints = {"node": node, "priority": random.choice((None, 1, 2)), "expected_steps_left": left}
                walker.enter_step({name: value for name, value in hints.items() if value is not None})
            case 5:
                walker.enter_tool()
            case 6 if programs and random.random() < 0.3:
                known = random.choice(programs)
                assert known.real.start() is known.real
                known.end()
            case _ if walker.frames:
                walker.leave()
        random.choice(walkers).check()
    for walker in reversed(walkers):
        while walker.frames:
            walker.leave()
        walker.check()
    events = told(online, ProgramStart, ProgramEnd)
    assert len(events) == 2 * len(programs), "each starts and ends once, by hand or with its block"
    starts = {e.program_id: e for e in events if isinstance(e, ProgramStart)}
    for one in programs:
        start = starts[one.real.id]
        assert (start.parent_program_id, start.root_program_id) == (one.parent_id, one.root_id)
        assert (start.call_id, start.tenant) == (one.call_id, one.tenant)
    assert sojourn.stats()["context_reset_failed"] == sojourn.stats()["internal_error"] == 0
