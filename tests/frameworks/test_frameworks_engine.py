"""A scenario of each framework against the real engine. The others tell the fake server the same facts."""

from __future__ import annotations

import gc

import pytest
import sojourn
from scenario_modules import Model, outcome, runnable_scenarios
from scenario_types import Scenario, join_pieces
from scripted_engine import Engine, ScriptedEngine, get
from sojourn.listeners import ProgramListener, add_listener, remove_listener
from waiting import wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(500),  # the first test waits for the engine's start
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),  # litellm's own, streaming
]


def one_of_each_framework() -> list[Scenario]:
    return list({scenario.framework: scenario for scenario in reversed(runnable_scenarios())}.values())


@pytest.mark.parametrize("scenario", one_of_each_framework(), ids=lambda scenario: scenario.id)
def test_a_real_engine_takes_what_is_sent_and_answers_the_same(scenario: Scenario, engine: Engine) -> None:
    plain = Model(scenario)
    with ScriptedEngine(engine.url, plain) as proxy:
        expected = outcome(scenario, proxy.base_url, "tiny")
    model, heard = Model(scenario), Heard()
    with ScriptedEngine(engine.url, model) as proxy:
        sojourn.init(proxy.url, probe_timeout_s=10)
        add_listener(heard)
        result = outcome(scenario, proxy.base_url, "tiny")
        gc.collect()  # a generator that was let go of ends its program here at the latest
        assert sojourn.flush(15.0), f"not every event arrived: {sojourn.stats()}"
        stats = sojourn.stats()
        requests = len({request.context.request_id for request in proxy.requests if request.context})
        remove_listener(heard)
        sojourn.shutdown()
    assert join_pieces(result) == join_pieces(expected), "sojourn changed what the framework returns"
    assert plain.ran_out == model.ran_out == 0, "more requests than scripted"
    refused = {name: stats[name] for name in stats if name in ("outcome_rejected", "outcome_unsupported")}
    assert not any(refused.values()), f"the engine did not take every event: {refused}"

    def settled() -> bool:
        """All programs have ended, and the ledgers have all turns."""
        found = [get(engine.url, f"/sojourn/v1/programs/{id}") for id in heard.ids]
        known = [program for program in found if program is not None]
        over = all(program["status"] == "ended" and not program["tools_running"] for program in known)
        turns = sum(len(program["ledger"]) for program in known)
        return over and len(known) == len(scenario.programs) and turns == requests

    wait_until(settled)


class Heard(ProgramListener):
    """Ids of the programs that the client started."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def program_started(self, program: sojourn.Program) -> None:
        self.ids.append(program.id)
