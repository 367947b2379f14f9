"""Patches of methods that another library patches too, and the hook that waits for a package."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

import pytest
from sojourn._import_hook import forget, when_imported
from sojourn.monkey_patches import Patches


@pytest.mark.parametrize("static", [False, True])
def test_a_call_is_reported_once_after_a_new_start_beneath_another_librarys_patch(static: bool) -> None:
    patches, reported = Patches(), []

    def answer(*args: Any) -> str:
        return "answer"

    def wrapped(inner: Callable[..., Any], before: Callable[[], None]) -> Any:
        @functools.wraps(inner)
        def wrapper(*args: Any) -> Any:
            before()
            return inner(*args)

        return staticmethod(wrapper) if static else wrapper

    def report() -> None:
        if patches.active:
            reported.append("call")

    class Agent:
        ask: Any = staticmethod(answer) if static else answer

    def start() -> None:
        patches.put(Agent, "ask", lambda theirs: wrapped(getattr(theirs, "__func__", theirs), report))

    start()
    Agent.ask = wrapped(Agent.ask, lambda: None)  # another library's patch
    patches.undo()
    assert (Agent().ask(), reported) == ("answer", []), "ours is beneath, and only calls the original"
    start()
    assert (Agent().ask(), reported) == ("answer", ["call"])


# -- The hook that waits for a package's import harms no other import


PACKAGE = "a_package_that_nothing_imports"
MODULE = "a_module_of_the_last_finder"


class Editable:
    """The last finder, as that of a package installed in editable form."""

    def __init__(self, path):
        self.path = path

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, SourceFileLoader(name, self.path)) if name == MODULE else None


class Meanwhile:
    """A finder that finds nothing. During its search another thread calls ``action``."""

    def __init__(self, action):
        self.action = action

    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            self.action()


@pytest.mark.parametrize(
    "action", [lambda: forget(PACKAGE), lambda: when_imported(PACKAGE, lambda: None)], ids=["forget", "wait"]
)
def test_an_import_in_progress_asks_every_finder(tmp_path, monkeypatch, action):
    (tmp_path / "module.py").write_text("answer = 42\n")
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    when_imported(PACKAGE, lambda: None)
    sys.meta_path += [Meanwhile(action), Editable(str(tmp_path / "module.py"))]
    assert importlib.import_module(MODULE).answer == 42
    forget(PACKAGE)
    del sys.modules[MODULE]
