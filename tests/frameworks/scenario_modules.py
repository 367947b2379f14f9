"""Finds the scenarios that this environment can run, and expected scenarios that it cannot run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from scenario_types import Scenario
from sojourn.testing import Answer, LlmRequest, ToolUse

HERE = Path(__file__).parent
EXPECTED_VARIABLE = "SOJOURN_TEST_FRAMEWORKS"
"""Environment variable with the frameworks that must be installed, separated by blanks. ``tox`` sets it. If
it is not set in CI, the frameworks of the engine's environment are expected."""
_ENGINE_ENVIRONMENT = "openai anthropic litellm mini_swe_agent"


class ScenarioModule(NamedTuple):
    """One ``scenarios_<framework>.py``."""

    framework: str
    scenarios: tuple[Scenario, ...]
    absent: dict[str, str]


def scenario_modules() -> Iterator[ScenarioModule]:
    """Yield the scenarios of each framework whose file can be imported. Raises ``ModuleNotFoundError`` if an
    expected framework is missing."""
    for path in sorted(HERE.glob("scenarios_*.py")):
        framework = path.stem.removeprefix("scenarios_")
        try:
            module = import_module(path.stem)
        except ModuleNotFoundError as error:
            if framework in expected():
                raise
            print(f"{path.name}: left out, no module {error.name!r}", file=sys.stderr)
            continue
        found = tuple(module.SCENARIOS)
        yield ScenarioModule(found[0].framework, found, getattr(module, "ABSENT", {}))


def runnable_scenarios() -> list[Scenario]:
    """Scenarios whose packages this environment has."""
    return [scenario for play in scenario_modules() for scenario in play.scenarios if not missing(scenario)]


def missing(scenario: Scenario) -> list[str]:
    """Packages that a scenario needs and that are not installed."""
    return [package for package in scenario.needs if not _found(package)]


def expected() -> tuple[str, ...]:
    """Frameworks without which a run here must fail."""
    in_ci = os.environ.get("CI", "").lower() in ("1", "true")
    return tuple(os.environ.get(EXPECTED_VARIABLE, _ENGINE_ENVIRONMENT if in_ci else "").split())


class Model:
    """A scenario's answers in turn, remembering every tool call it asks for."""

    def __init__(self, scenario: Scenario) -> None:
        self._answers = iter(list(scenario.script()))
        self.asked: list[ToolUse] = []
        self.ran_out = 0

    def __call__(self, request: LlmRequest) -> Answer:
        """Return the next answer. The server calls this from several threads."""
        reply = next(self._answers, None)
        if reply is None:
            self.ran_out += 1
            reply = "the script is over"
        answer = Answer.of(reply)
        self.asked += answer.tools
        return answer


def outcome(scenario: Scenario, base_url: str, model: str) -> tuple[str, Any]:
    """Play a scenario. Return ("returned", result), or ("raised", class name) for its expected exception.
    Other exceptions are raised."""
    try:
        return "returned", scenario.play(base_url, model)
    except BaseException as error:
        if type(error).__name__ != scenario.raises:
            raise
        return "raised", type(error).__name__


def _found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a submodule whose parent is not there
        return False
