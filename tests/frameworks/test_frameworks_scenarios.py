"""Every scenario of every framework against the fake server: same results, and correct reports.

To add a framework, write ``scenarios_<framework>.py`` (see ``scenario_types``) and run this file.
"""

from __future__ import annotations

import gc
from collections import Counter
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import sojourn
from recorded_programs import drawing, facts, logical, problems, recorded_programs
from scenario_modules import (
    EXPECTED_VARIABLE,
    Model,
    expected,
    missing,
    outcome,
    runnable_scenarios,
    scenario_modules,
)
from scenario_types import RETRY, ROWS, Scenario
from sojourn.instrumentation import FRAMEWORKS
from sojourn.monkey_patches import Patches
from sojourn.program import NO_CONTEXT, current_context
from sojourn.testing import FakeServer

pytestmark = [
    pytest.mark.timeout(60),  # AutoGen waits for ever where an exception of ours gets out
    pytest.mark.filterwarnings("ignore:Items? .* on TypedDict class:UserWarning"),  # litellm's own, streaming
]

FAULTS = (
    "internal_error", "inject_error", "attach_error", "resolver_error", "listener_error", "hint_invalid",
    "context_reset_failed", "encode_error", "dropped_full", "dropped_send", "dropped_closed",
)  # fmt: skip
ENDINGS = ("ended", "failed", "cancelled", "closed_early", "abandoned")


class ScenarioResult(NamedTuple):
    """One run of a scenario."""

    result: tuple[str, Any]
    server: FakeServer
    model: Model
    stats: sojourn.Stats


def played(scenario: Scenario, *, instrumented: bool, failures: int = 0) -> ScenarioResult:
    """Run it against a fake server of its own."""
    model = Model(scenario)
    with FakeServer(model) as server:
        server.fail_next = failures
        if instrumented:
            sojourn.init(server.url, probe_timeout_s=5)
        before = current_context.get()
        result = outcome(scenario, server.base_url, "tiny")
        gc.collect()  # a generator that was let go of ends its program here at the latest
        assert current_context.get() is before is NO_CONTEXT, (
            f"a program leaked into the caller's context: {current_context.get()}"
        )
        stats = sojourn.stats()
        if instrumented:
            assert sojourn.flush(60), "events were lost or not sent within 60 s"
            sojourn.shutdown()
    return ScenarioResult(result, server, model, stats)


@pytest.mark.parametrize("scenario", runnable_scenarios(), ids=lambda scenario: scenario.id)
def test_the_fake_server_gets_every_fact(scenario: Scenario) -> None:
    failures = int(scenario.row == RETRY)
    plain = played(scenario, instrumented=False, failures=failures)
    ours = played(scenario, instrumented=True, failures=failures)
    assert ours.result == plain.result, "sojourn changed what the framework returns"
    assert ours.result[0] == ("raised" if scenario.raises else "returned")
    for each in (plain, ours):
        assert each.model.ran_out == 0, f"the framework made {each.model.ran_out} requests more than scripted"
    assert plain.server.requests, "no request reached the server"
    assert not any(request.context for request in plain.server.requests), "told without init()"
    if scenario.row != "cancel":
        assert kinds(ours) == kinds(plain), "sojourn changed which requests the framework makes"
    check_recorded(scenario, ours)
    check_counts(scenario, ours)


def first_requests() -> list[Scenario]:
    """One scenario of each framework that a failed first request may befall."""
    chosen: dict[str, Scenario] = {}
    for row in (RETRY, "sync", "async"):
        for scenario in runnable_scenarios():
            if scenario.row == row:
                chosen.setdefault(scenario.framework, scenario)
    return list(chosen.values())


@pytest.mark.parametrize("scenario", first_requests(), ids=lambda scenario: scenario.id)
def test_a_retry_is_the_same_logical_request(scenario: Scenario) -> None:
    ours = played(scenario, instrumented=True, failures=1)
    first, second = (request.context for request in ours.server.requests[:2])
    assert first is not None
    assert second is not None
    assert first.request_id == second.request_id, "the second attempt passes for a request of its own"
    assert len(logical(ours.server.requests)) == len(ours.server.requests) - 1
    check_recorded(scenario, ours)
    check_counts(scenario, ours)


@pytest.mark.parametrize("play", list(scenario_modules()), ids=lambda play: play.framework)
def test_every_row_is_played_or_listed_as_absent(play: Any) -> None:
    rows = {scenario.row for scenario in play.scenarios}
    assert rows <= {*ROWS, RETRY}, "unknown rows"
    assert not rows & play.absent.keys(), "said to be absent, and played"
    lacking = [row for row in ROWS if row not in rows and row not in play.absent]
    assert not lacking, f"no scenario for {lacking}; write one, or give the reason in ABSENT"
    assert all(len(reason) > 20 for reason in play.absent.values()), "say why it is absent"
    ids = Counter(scenario.id for scenario in play.scenarios)
    assert not [id for id, count in ids.items() if count > 1], "two scenarios of one name"


def test_every_framework_that_can_be_instrumented_is_played() -> None:
    known = {play.framework for play in scenario_modules()}
    assert sorted(FRAMEWORKS.keys() - known) == [], "these need a scenarios_<framework>.py"


def test_nothing_that_should_be_here_is_missing() -> None:
    """Where an environment promises a framework, its scenarios must run: leaving them out is no success."""
    by_name = {play.framework: play for play in scenario_modules()}
    for framework in expected():
        assert framework in by_name, f"{framework} of ${EXPECTED_VARIABLE} has no scenario file"
        lacking = {package for each in by_name[framework].scenarios for package in missing(each)}
        assert not lacking, f"{framework} is expected here, but {sorted(lacking)} cannot be imported"


def patchable() -> list[str]:
    """The frameworks whose methods are replaced; LangChain has a hook of its own."""
    here = {scenario.framework for scenario in runnable_scenarios()}
    return sorted(here & FRAMEWORKS.keys() - {"langchain"})


@pytest.mark.parametrize("framework", patchable())
def test_uninstrument_puts_the_very_same_functions_back(
    framework: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs: dict[tuple[int, str], tuple[Any, Any]] = {}
    put = Patches.put

    def watched(self: Patches, owner: Any, name: str, make: Any) -> None:
        theirs.setdefault((id(owner), name), (owner, stored(owner, name)))
        put(self, owner, name, make)

    def stored(owner: Any, name: str) -> Any:
        return vars(owner).get(name) or getattr(owner, name)

    def unchanged() -> list[bool]:
        return [stored(owner, name) is own for (_, name), (owner, own) in theirs.items()]

    monkeypatch.setattr(Patches, "put", watched)
    import_module(FRAMEWORKS[framework].package)
    sojourn.init(server.url, instrument=False, probe_timeout_s=5)
    for undo in (sojourn.uninstrument, sojourn.shutdown):
        for _ in range(2):  # never twice
            sojourn.instrument(framework)
        assert framework in sojourn.stats().instrumented
        assert not any(unchanged())
        undo()
        assert all(unchanged())
        assert theirs


def check_recorded(scenario: Scenario, ours: ScenarioResult) -> None:
    """The scenario's facts, and what holds for all."""
    if scenario.framework in FRAMEWORKS:
        assert scenario.framework in ours.stats.instrumented, "sojourn.init() did not attach to it"
    recorded = recorded_programs(ours.server)
    wrong = problems(ours.server, recorded, ours.model.asked)
    assert not wrong, "\n".join(["", *wrong])
    seen = drawing(facts(recorded), in_order=scenario.in_order)
    right = drawing(scenario.programs, in_order=scenario.in_order)
    assert seen == right, f"\n--- the server was told:\n{seen}\n--- right would be:\n{right}\n"


def check_counts(scenario: Scenario, ours: ScenarioResult) -> None:
    """``stats()`` agrees with what arrived."""
    stats, requests = ours.stats, ours.server.requests
    faults = {name: stats[name] for name in FAULTS if stats[name]}
    assert not faults, f"our own faults, or signs of them: {faults}"
    ended = sum(stats[f"requests_{how}"] for how in ENDINGS)
    assert stats["requests_started"] == ended, "logical requests started, and ended"
    streams = sum(bool(request.body.get("stream")) for request in logical(requests))
    if scenario.row == "cancel":
        # A request may be cancelled before a byte of it was sent, an answer before its first byte.
        assert stats["requests_started"] >= len(logical(requests))
        return
    assert stats["requests_started"] == len(logical(requests)), "logical requests counted, and arrived"
    assert stats["request_attempts"] == len(requests), "attempts counted, and arrived"
    assert stats["ttft_count"] == streams, "first tokens counted, and streams asked for"


def kinds(run: ScenarioResult) -> Counter[tuple[str, bool, int]]:
    """Path, streaming, and number of messages of each request: what must not depend on us."""
    return Counter(
        (request.path, bool(request.body.get("stream")), len(request.body.get("messages") or ()))
        for request in run.server.requests
    )
