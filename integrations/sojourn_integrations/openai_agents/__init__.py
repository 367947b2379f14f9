"""OpenAI Agents SDK (``openai-agents`` ≥ 0.6): reports each run as a program, with its nodes and tool calls.

Two ways to use it:

- ``sojourn.init(url)``: the default runner, which ``Runner.run``, ``run_sync``, ``run_streamed`` and
  ``agent.as_tool()`` use, becomes a ``SojournRunner`` around the original runner;
- without any patch: ``SojournRunner().run(agent, …)``, or ``Runner.run(agent, …, hooks=Hooks())`` inside
  ``with sojourn.program(): …``. ``Hooks(mine)`` and ``SojournRunner`` both pass every call on to the user's
  own hooks.

``run_programs`` finds the program of a run; ``run_hooks`` reports nodes and tool calls. Checked with 0.6.0
and 0.24.0.

``docs/frameworks/openai-agents.md`` lists what is not reported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple
from weakref import finalize, ref

from sojourn.errors import status_of
from sojourn.monkey_patches import Patches
from sojourn.program import remove_resolver

from sojourn_integrations.safe_scope import guarded

from .agent_graph import graph_of
from .run_hooks import HOOKS, BaseHooks, Run, chain_hook, record_tool_errors, resolve, running
from .run_programs import begin, end, end_kept_programs

__all__ = ["Hooks", "SojournRunner", "graph_of", "patch", "unpatch", "wrap"]

_RUNNER = "DEFAULT_AGENT_RUNNER"
_patches = Patches()
_everywhere = False
_wrapped: dict[int, Any] = {}
"""Weak references to wrapped agents, by ``id()``, since agents are not hashable."""


def patch() -> bool | None:
    """Report every run from now on. Returns False if this SDK lacks a function that the patch needs, and
    ``None`` if the package ``agents`` is not the OpenAI Agents SDK. In both cases nothing is patched."""
    global _everywhere
    if not _is_openai_agents_sdk():
        return None
    if not _install():
        return False
    _everywhere = True
    return True


def unpatch() -> None:
    """Undo ``patch`` and every ``wrap`` of an agent: restore the original default runner. A ``SojournRunner``
    that ``wrap`` returned still reports its runs. If another library has wrapped our default runner, ours
    stays inside and only passes calls on."""
    global _everywhere
    _everywhere = False
    _wrapped.clear()
    _patches.undo()
    remove_resolver(resolve)
    end_kept_programs()


def wrap(target: Any) -> Any | None:
    """Wrap a runner in a ``SojournRunner`` and return that. For an agent, report its runs as programs from
    now on, and return the agent itself. Returns ``None`` for other objects, and for an agent if this SDK
    lacks a function that must be patched."""
    if not _is_openai_agents_sdk():
        return None
    kinds = _kinds()
    if isinstance(target, kinds.SojournRunner):
        return target
    if isinstance(target, kinds.AgentRunner):
        return kinds.SojournRunner(target)
    if not isinstance(target, import_module("agents").Agent) or not _install():
        return None
    key = id(target)
    _wrapped[key] = ref(target, lambda _: _wrapped.pop(key, None))
    return target


def __getattr__(name: str) -> Any:
    """Create ``Hooks`` and ``SojournRunner`` at first use, since that imports the framework."""
    if name in ("Hooks", "SojournRunner"):
        return getattr(_kinds(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Kinds(NamedTuple):
    """The framework's classes that this package needs, and our subclasses of them."""

    RunHooks: Any
    AgentRunner: Any
    Hooks: Any
    SojournRunner: Any
    DefaultRunner: Any


@functools.cache
def _kinds() -> _Kinds:
    """Return the framework's classes and our subclasses of them. Imports the framework."""
    hooks: Any = import_module("agents.lifecycle").RunHooksBase
    runner: Any = import_module("agents.run").AgentRunner
    names = {name for name in dir(hooks) if name.startswith("on_")} | HOOKS.keys()
    methods: dict[str, Any] = {name: chain_hook(name) for name in names}

    def made(name: str, ours: type, theirs: Any, **body: Any) -> Any:
        return type(name, (ours, theirs), {**body, "__module__": __name__, "__doc__": ours.__doc__})

    sojourns = made("SojournRunner", _Runner, runner)
    return _Kinds(
        RunHooks=hooks,
        AgentRunner=runner,
        Hooks=made("Hooks", BaseHooks, hooks, **methods),
        SojournRunner=sojourns,
        DefaultRunner=made("DefaultRunner", _Selective, sojourns),
    )


def _is_openai_agents_sdk() -> bool:
    """Return whether the package ``agents`` is the OpenAI Agents SDK; many projects have a package of that
    name."""
    package = import_module("agents")
    return hasattr(package, "Runner") and hasattr(package, "function_tool")


def _install() -> bool:
    run = import_module("agents.run")
    wanted = ("set_default_agent_runner", "get_default_agent_runner", _RUNNER)
    agent_runner = getattr(run, "AgentRunner", None)
    methods = ("run", "run_sync", "run_streamed")
    if not all(hasattr(run, name) for name in wanted) or not all(hasattr(agent_runner, m) for m in methods):
        return False
    _patches.put(run, _RUNNER, _kinds().DefaultRunner)
    tracing = import_module("agents.util._error_tracing")
    # Without this patch, a tool whose exception became text for the model seems to succeed.
    if hasattr(tracing, "attach_error_to_current_span"):
        _patches.put(tracing, "attach_error_to_current_span", record_tool_errors)
    return True


class _Runner:
    """A runner that reports every run as a program. ``inner``: the runner that does the work, by default the
    framework's ``AgentRunner``."""

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner if inner is not None else _kinds().AgentRunner()

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # missing before __init__, as in a copy
            raise AttributeError(name)
        return getattr(self._inner, name)

    async def run(self, starting_agent: Any, input: Any, **kwargs: Any) -> Any:
        """Run the agent with the inner runner, inside a program."""
        with self._reported(starting_agent, input, kwargs) as reported:
            reported.result = await self._inner.run(starting_agent, input, **reported.kwargs)
        return reported.result

    def run_sync(self, starting_agent: Any, input: Any, **kwargs: Any) -> Any:
        """Run the agent with the inner runner, inside a program."""
        with self._reported(starting_agent, input, kwargs) as reported:
            reported.result = self._inner.run_sync(starting_agent, input, **reported.kwargs)
        return reported.result

    def run_streamed(self, starting_agent: Any, input: Any, **kwargs: Any) -> Any:
        """Run the agent with the inner runner, inside a program that ends with the task that feeds the
        stream."""
        with self._reported(starting_agent, input, kwargs, _end_with_stream) as reported:
            reported.result = self._inner.run_streamed(starting_agent, input, **reported.kwargs)
        return reported.result

    @contextmanager
    def _reported(
        self, agent: Any, given: Any, kwargs: dict[str, Any], ends: Callable[[Run, Any], None] | None = None
    ) -> Iterator[_Reported]:
        """Report the run that the block makes, and end it after the block, or as ``ends`` does."""
        run: Run | None = None
        # If another library's runner is between two of ours, the outer one of ours reports.
        if getattr(kwargs.get("hooks"), "_by_runner", None) is not True and self._reports(agent):
            run = begin(agent, given, kwargs.get("session"), kwargs.get("max_turns"))
        if run is None:
            yield _Reported(kwargs)
            return
        reported = _Reported(_with_hooks(kwargs) or kwargs)
        try:
            yield reported
        except BaseException as error:
            run.leave()
            end(run, status_of(error))
            raise
        run.leave()
        if ends is None:
            end(run, "ok", reported.result)
        else:
            ends(run, reported.result)

    def _reports(self, agent: Any) -> bool:
        return True


class _Selective:
    """Mix-in that decides which runs the default runner reports: after ``patch`` every run, otherwise only
    the runs of wrapped agents and all runs inside them."""

    def _reports(self, agent: Any) -> bool:
        if _everywhere:
            return True
        reference = _wrapped.get(id(agent))
        # A run inside a reported run is reported too.
        return (reference is not None and reference() is agent) or bool(_wrapped and running.get())


class _Reported:
    """A call of the inner runner: the arguments to pass to it, and its result."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.kwargs = kwargs
        self.result: Any = None


@guarded
def _with_hooks(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` with our hooks around the user's."""
    kinds, theirs = _kinds(), kwargs.get("hooks")
    # The framework itself rejects an object that is not a RunHooks.
    if isinstance(theirs, kinds.Hooks) or not isinstance(theirs, (kinds.RunHooks, type(None))):
        return kwargs
    return {**kwargs, "hooks": kinds.Hooks(theirs, by_runner=True)}


@guarded
def _end_with_stream(run: Run, result: Any) -> None:
    task = getattr(result, "run_loop_task", None) or getattr(result, "_run_impl_task", None)
    if task is not None:
        task.add_done_callback(functools.partial(_loop_done, run, result))
    else:
        finalize(result, end, run, "ok").atexit = False


def _loop_done(run: Run, result: Any, task: Any) -> None:
    guardrails = getattr(result, "_input_guardrails_task", None)

    def over(_: Any) -> None:
        end(run, guarded(_stream_status)(result, task, guardrails) or "ok", result)

    if guardrails is not None and not guardrails.done():
        guardrails.add_done_callback(over)  # guardrails make requests of this run and may still fail it
    else:
        over(task)


def _stream_status(result: Any, *tasks: Any) -> str:
    """Return the status of a streamed run. An exception that the stream would raise counts even if the user
    never reads to that point."""
    # Not task.exception(), which would mark the exception as retrieved.
    errors = [
        getattr(result, "_stored_exception", None),
        *(getattr(task, "_exception", None) for task in tasks),
    ]
    error = next((error for error in errors if error is not None), None)
    if error is not None:
        return status_of(error)
    outcomes = [getattr(each, "output", None) for each in getattr(result, "input_guardrail_results", ())]
    if any(getattr(outcome, "tripwire_triggered", False) for outcome in outcomes):
        return "error"
    unfinished = getattr(result, "final_output", None) is None
    if tasks[0].cancelled() or (unfinished and getattr(result, "_cancel_mode", "none") != "none"):
        return "cancelled"
    turns, limit = getattr(result, "current_turn", 0), getattr(result, "max_turns", None)
    return "error" if unfinished and limit is not None and turns > limit else "ok"
