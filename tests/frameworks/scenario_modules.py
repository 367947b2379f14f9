"""Finds the scenarios that this environment can run, and the expected ones that it cannot."""

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
"""Frameworks that this environment is supposed to have, separated by blanks; ``tox`` sets it. Without it, in
CI, those of the engine's environment."""
_ENGINE_ENVIRONMENT = "openai litellm mini_swe_agent"


class ScenarioModule(NamedTuple):
    """One ``scenarios_<framework>.py``."""

    framework: str
    scenarios: tuple[Scenario, ...]
    absent: dict[str, str]


def scenario_modules() -> Iterator[ScenarioModule]:
    """All scenario files, whatever is installed."""
    for path in sorted(HERE.glob("scenarios_*.py")):
        framework = path.stem.removeprefix("scenarios_")
        try:
            module = import_module(path.stem)
        except ModuleNotFoundError as error:
            if framework in expected():
                raise
            print(f"{path.name}: left out, no module {error.name!r}", file=sys.stderr)
            continue
        absent = getattr(module, "ABSENT", {})
        scenarios = tuple(module.SCENARIOS)
        for name in sorted({scenario.framework for scenario in scenarios}):
            mine = tuple(each for each in scenarios if each.framework == name)
            # A file may hold two frameworks that share an adapter, and then one dict for each of them.
            yield ScenarioModule(name, mine, absent.get(name, absent) if _nested(absent) else absent)


def runnable_scenarios() -> list[Scenario]:
    """What this environment has the packages for."""
    return [scenario for play in scenario_modules() for scenario in play.scenarios if not missing(scenario)]


def missing(scenario: Scenario) -> list[str]:
    """Packages it needs that are not here."""
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
        """The next one; the server calls this from several threads."""
        reply = next(self._answers, None)
        if reply is None:
            self.ran_out += 1
            reply = "the script is over"
        answer = Answer.of(reply)
        self.asked += answer.tools
        return answer


def outcome(scenario: Scenario, base_url: str, model: str) -> tuple[str, Any]:
    """("returned", what) or ("raised", class name). An exception that it should not raise passes."""
    try:
        return "returned", scenario.play(base_url, model)
    except BaseException as error:
        if type(error).__name__ != scenario.raises:
            raise
        return "raised", type(error).__name__


def _nested(absent: dict[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in absent.values())


def _found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a submodule whose parent is not there
        return False
