"""Random walks of several tasks through nested blocks: each request says what a naive model says."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import pytest
import sojourn
from sojourn.testing import FakeServer
from sojourn.wire_codec import decode_context


class Known:
    """A program as the model knows it. ``outer`` is the place around its block."""

    def __init__(
        self, real: sojourn.Program, parent: Known | None, call_id: str | None, outer: Place
    ) -> None:
        self.real, self.parent, self.call_id, self.outer = real, parent, call_id, outer
        self.ended = False

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

    def enter_program(self, scope: Any) -> Known:
        outer = self.live()
        real = self.context.run(scope.__enter__)
        of_parent = outer.tool is not None and outer.tool.program is (outer.program and outer.program.real)
        call_id = outer.tool.call_id if of_parent else None
        known = Known(real, outer.program, call_id, outer)
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
        said = decode_context(self.context.run(sojourn.request_fields)["vllm_xargs"]["agentic_context"])
        ours = said.sojourn
        assert ours is not None
        assert (ours.node, said.priority) == (live.hints.get("node"), live.hints.get("priority"))
        assert ours.expected_steps_left == live.hints.get("expected_steps_left")
        known = live.program
        assert self.context.run(sojourn.current_program) is (known and known.real)
        if known is None:
            assert ours.implicit
            return
        top = known
        while top.parent is not None:
            top = top.parent
        assert (said.program_id, ours.heartbeat) == (known.real.id, not known.ended)
        assert said.parent_program_id == (known.parent and known.parent.real.id)
        assert said.root_program_id == (top.real.id if top is not known else None)
        assert known.real.call_id == known.call_id


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
            case 1 | 2:
                programs.append(walker.enter_program(random.choice([sojourn.program("own"), *scopes])))
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
                random.choice(programs).end()
            case _ if walker.frames:
                walker.leave()
        random.choice(walkers).check()
    for walker in reversed(walkers):
        while walker.frames:
            walker.leave()
        walker.check()
    assert sojourn.stats()["context_reset_failed"] == sojourn.stats()["internal_error"] == 0
