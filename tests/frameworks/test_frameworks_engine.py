"""A scenario of each row of every framework against the real engine, seen with the engine's eyes. The others
tell the fake server the same kinds of facts."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import sojourn
from scenario_modules import Model, one_of_each_row, outcome
from scenario_types import RETRY, ProgramFact, Scenario, ToolFact
from scripted_engine import Engine, ScriptedEngine, get
from sojourn.instrumentation import FRAMEWORKS
from sojourn.listeners import ProgramListener, add_listener, remove_listener
from sojourn.testing import ToolUse
from stream_pieces import join_pieces

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),  # litellm's own, streaming
]
SETTLE_S = 15.0
"""How long the engine may take to hear of the last event."""


@pytest.mark.timeout(500)
def test_the_engine_starts(engine: Engine) -> None:
    """Its start has a limit of its own."""
    assert get(engine.url, "/sojourn/v1/capabilities")["name"] == "sojourn"


@pytest.mark.parametrize("scenario", one_of_each_row(), ids=lambda scenario: scenario.id)
def test_the_engine_knows_everything(scenario: Scenario, engine: Engine) -> None:
    plain = Model(scenario)
    with ScriptedEngine(engine.url, plain) as proxy:
        proxy.fail_next = int(scenario.row == RETRY)
        expected = outcome(scenario, proxy.base_url, "tiny")
    model, heard = Model(scenario), Heard()
    with ScriptedEngine(engine.url, model) as proxy:
        proxy.fail_next = int(scenario.row == RETRY)
        sojourn.init(proxy.url, probe_timeout_s=10)
        assert sojourn.stats().dialect == "sojourn"
        add_listener(heard)
        result = outcome(scenario, proxy.base_url, "tiny")
        gc.collect()  # a generator that was let go of ends its program here at the latest
        assert sojourn.flush(SETTLE_S), f"not every event arrived: {sojourn.stats()}"
        stats = sojourn.stats()
        requests = len({request.context.request_id for request in proxy.requests if request.context})
        programs = settled(engine, heard.ids, requests)
        remove_listener(heard)
        sojourn.shutdown()
    assert join_pieces(result) == join_pieces(expected), "sojourn changed what the framework returns"
    assert plain.ran_out == model.ran_out == 0, "more requests than scripted"
    if scenario.framework in FRAMEWORKS:
        assert scenario.framework in stats.instrumented
    seen, right = drawn_by_engine(programs, scenario), drawn_as_expected(scenario)
    assert seen == right, f"\n--- the engine knows:\n{seen}\n--- right would be:\n{right}\n"
    assert sum(map(served, programs)) == requests
    refused = {name: stats[name] for name in stats if name in ("outcome_rejected", "outcome_unsupported")}
    assert not any(refused.values()), f"the engine did not take every event: {refused}"
    check_tools(programs, scenario, model.asked)


class Heard(ProgramListener):
    """Ids of the programs that the client started."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def program_started(self, program: sojourn.Program) -> None:
        self.ids.append(program.id)


def settled(engine: Engine, ids: list[str], requests: int) -> list[dict[str, Any]]:
    """The programs in full, once all have ended and all turns are through, or time is up."""
    until_s = time.monotonic() + SETTLE_S
    while True:
        found = [get(engine.url, f"/sojourn/v1/programs/{id}") for id in ids]
        known = [program for program in found if program is not None]
        over = all(program["status"] == "ended" and not program["requests"] for program in known)
        if over and len(known) == len(ids) and sum(map(served, known)) == requests:
            return known
        if time.monotonic() > until_s:
            return known
        time.sleep(0.1)


def served(program: dict[str, Any]) -> int:
    """Requests that ran and have left. ``turns`` counts none that its client broke off, and whether that came
    before the answer's end is chance."""
    return len(program["ledger"])


def drawn_as_expected(scenario: Scenario) -> str:
    facts = {fact.key: fact for fact in scenario.programs}
    children: dict[str | None, list[ProgramFact]] = {}
    for fact in scenario.programs:
        children.setdefault(fact.parent, []).append(fact)

    def lines(fact: ProgramFact) -> list[str]:
        # A request at no node leaves the program where it was.
        nodes = [node for node in fact.nodes if node is not None] if scenario.in_order else []
        inner = sorted("\n".join(lines(child)) for child in children.get(fact.key, ()))
        return [_line("ended", len(fact.nodes), nodes[-1] if nodes else None), *_indented(inner)]

    assert all(fact.parent is None or fact.parent in facts for fact in scenario.programs)
    return "\n".join(sorted("\n".join(lines(fact)) for fact in children[None]))


def drawn_by_engine(programs: list[dict[str, Any]], scenario: Scenario) -> str:
    known = {program["program_id"] for program in programs}
    roots = [p for p in programs if p["parent_program_id"] not in known]

    def lines(program: dict[str, Any]) -> list[str]:
        children = [p for p in programs if p["parent_program_id"] == program["program_id"]]
        inner = sorted("\n".join(lines(child)) for child in children)
        node = program["node"] if scenario.in_order else None
        return [_line(program["status"], served(program), node), *_indented(inner)]

    assert all(program["parent_program_id"] is None for program in roots), "a parent that was never told of"
    return "\n".join(sorted("\n".join(lines(program)) for program in roots))


def _line(status: str, requests: int, node: str | None) -> str:
    return f"program {status}, {requests} requests, last at {node}"


def _indented(blocks: list[str]) -> list[str]:
    return [f"  {line}" for block in blocks for line in block.splitlines()]


def check_tools(programs: list[dict[str, Any]], scenario: Scenario, asked: list[ToolUse]) -> None:
    """Each tool that the engine names is one that ran or that its own parser read, and none runs any more."""
    ran = {_label(tool) for fact in scenario.programs for tool in fact.tools}
    seen: set[str] = set()
    for program in programs:
        assert program["tools_running"] == 0
        seen |= tools_seen(program)
    strange = seen - ran - {use.name for use in asked}
    assert not strange, f"the engine saw {sorted(strange)}, the scenario runs {sorted(ran)}"
    assert seen & ran or not ran, f"the engine saw none of {sorted(ran)}"


def tools_seen(program: dict[str, Any]) -> set[str]:
    """The tool after the last turn, and those before each other one; of parallel tools it is the longest."""
    return {program["tool"], *(turn["tool_before"] for turn in program["ledger"])} - {None}


def _label(tool: ToolFact) -> str:
    return tool.tool if tool.tool_class is None else f"{tool.tool}:{tool.tool_class}"
