"""mini-swe-agent 2.x ("mini"): each run is a program, each bash command is a tool call of the program.

There are three ways to use this module; none changes mini:

- ``mini --agent-class sojourn_integrations.mini_swe_agent.InteractiveAgent`` (or ``.DefaultAgent``);
- ``instrument()`` once per process, which ``sojourn run mini …`` does for you;
- ``attach(agent)`` for one agent that your code builds.

mini's requests are reported by the patches of openai and litellm, which ``sojourn.init`` makes. This module
only joins mini's retries to one logical request.

The class of an agent, of its model and of its environment is replaced by a subclass with the same name (see
``instance_method_wrapper``). So ``isinstance`` and ``serialize()`` work as before. A copied agent is attached
too, and its methods act on the copy. Exceptions of the user's code pass unchanged; no exception of ours
reaches an agent. mini is imported only when it is needed. Checked with 2.0.0 and 2.4.6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import sojourn
from sojourn.monkey_patches import Around, Patches
from sojourn.outgoing_request import RetryScope
from sojourn.shell_command import command_class
from sojourn.user_hints import step_limit

from .instance_method_wrapper import overlay_method, remove_all_overlays, remove_overlay
from .safe_scope import count_error, entered, inside, set_status

__all__ = ["DefaultAgent", "InteractiveAgent", "attach", "detach", "instrument", "uninstrument", "wrap"]  # noqa: F822

_running: ContextVar[frozenset[int]] = ContextVar("sojourn_mini_running", default=frozenset())
_executing: ContextVar[frozenset[int]] = ContextVar("sojourn_mini_executing", default=frozenset())

_patches = Patches()


def attach(agent: Any) -> Any:
    """Wrap the agent's ``run``, its model's ``query`` and its environment's ``execute``. Returns the agent.

    Repeating it is harmless. Objects whose class cannot be replaced stay unchanged. Copies of the agent are
    attached too. An unpickled agent is attached only if the process that runs it called ``instrument``.
    """
    _overlay(agent, "run", _in_program)
    _attach_parts(agent)
    return agent


def detach(agent: Any) -> Any:
    """Undo ``attach`` for one agent, its model and its environment. Returns the agent."""
    for owner, _, _ in ((agent, "run", _in_program), *_parts(agent)):
        remove_overlay(owner)
    return agent


def instrument() -> None:
    """Attach to every agent made or run from now on in this process. Repeating it is harmless. Imports mini.

    If mini's ``DefaultAgent`` has no ``__init__`` or ``run`` of its own, mini stays unchanged.
    """
    patch()


def uninstrument() -> None:
    """Undo ``instrument`` and every ``attach``, for existing agents too.

    If another library patched a method after us, its patch stays, and our function beneath that patch only
    calls mini's.
    """
    _patches.undo()
    remove_all_overlays()


def patch() -> bool:
    """Patch mini's ``DefaultAgent``, for ``instrument`` and ``sojourn.init``. Returns False, without changes,
    if that class has no ``__init__`` or ``run`` of its own."""
    from minisweagent.agents.default import DefaultAgent as agent_class

    if not {"__init__", "run"} <= vars(agent_class).keys():
        return False
    _patches.put(agent_class, "__init__", _attaching)
    _patches.wrap_method(agent_class, "run", _attached_run)
    return True


unpatch = uninstrument


def wrap(target: Any) -> Any | None:
    """Attach to ``target`` and return it, for ``sojourn.wrap``. Returns ``None`` for an object that is not an
    agent of mini."""
    if not all(hasattr(target, name) for name in ("run", "model", "env")):
        return None
    return attach(target)


def __getattr__(name: str) -> Any:
    """Create ``DefaultAgent`` and ``InteractiveAgent`` at first use, since that imports mini."""
    if name == "DefaultAgent":
        from minisweagent.agents.default import DefaultAgent as base
    elif name == "InteractiveAgent":
        from minisweagent.agents.interactive import InteractiveAgent as base
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        attach(self)

    doc = f"mini's own ``{name}``, attached."
    made = type(name, (base,), {"__init__": __init__, "__doc__": doc, "__module__": __name__})
    globals()[name] = made
    return made


# ---- one run


def _attaching(initialise: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialise)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if _patches.active:
            _attach_parts(self)

    return __init__


def _attached_run(agent: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _attach_parts(agent)  # __init__ never ran for a copied or unpickled agent
    return _in_program(agent, run, args, kwargs)


def _in_program(agent: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``run`` inside a new program. If the agent is already inside its ``run``, there is no new
    program."""
    running = _running.get()
    if id(agent) in running:
        return run(*args, **kwargs)
    kind = type(agent).__name__
    # mini-extra's batch runs name their agents after the instance.
    name = getattr(agent, "instance_id", None) or kind
    with entered(lambda: sojourn.program(str(name), agent_type=kind, max_steps=_steps_left(agent))):
        token = _running.set(running | {id(agent)})
        try:
            return run(*args, **kwargs)
        finally:
            _running.reset(token)


def _steps_left(agent: Any) -> int | None:
    """Return how many steps the agent's limit leaves for its runs; ``None`` without a limit."""
    most = step_limit(getattr(getattr(agent, "config", None), "step_limit", None))
    return most and max(0, most - getattr(agent, "n_calls", 0))


# ---- one command


def _in_tool_call(
    environment: Any, execute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``execute`` inside a new tool call. If this environment is already inside an ``execute``, there is
    no new tool call."""
    executing = _executing.get()
    if id(environment) in executing:
        return execute(*args, **kwargs)
    make = functools.partial(_tool_call, args[0] if args else kwargs.get("action"))
    with entered(make) as call:
        token = _executing.set(executing | {id(environment)})
        try:
            output = execute(*args, **kwargs)
        finally:
            _executing.reset(token)
        set_status(call, _status, output)
    return output


def _tool_call(action: Any) -> Any:
    fields = action if isinstance(action, Mapping) else {}
    command = fields.get("command")
    head = command_class(command) if isinstance(command, str) else None
    return sojourn.tool_call("bash", fields.get("tool_call_id"), tool_class=head)


def _status(output: Any) -> str:
    """Return a command's status. mini reports timeouts and failures in the output and does not raise them."""
    if not isinstance(output, Mapping):
        return "ok"
    problem = output.get("exception_info")
    if problem:
        return "timeout" if "timed out" in str(problem) else "error"
    return "nonzero" if output.get("returncode") else "ok"


# ---- one request


_as_one_request = inside(lambda model: RetryScope())
"""Wraps a model's ``query``, which retries up to ten times, as one logical request. The patches of openai and
litellm report the request."""


# ---- wrapping


def _attach_parts(agent: Any) -> None:
    for owner, name, around in _parts(agent):
        _overlay(owner, name, around)


def _parts(agent: Any) -> Iterator[tuple[Any, str, Around]]:
    environment = getattr(agent, "env", None)
    if environment is not None:
        yield environment, "execute", _in_tool_call
    model = getattr(agent, "model", None)
    # A model that switches between other models (roulette) sends its requests through these models.
    for each in (model, *(getattr(model, "models", None) or ())):
        if each is not None:
            yield each, "query", _as_one_request


def _overlay(owner: Any, name: str, around: Around) -> None:
    try:
        overlay_method(owner, name, around)
    except Exception:
        count_error("attach_error")
