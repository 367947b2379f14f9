"""mini-swe-agent 2.x: one run is a program, one bash command a tool call of it.

Three ways in, none of which needs a change to mini:

- ``mini --agent-class sojourn_integrations.mini_swe_agent.InteractiveAgent`` (or ``.DefaultAgent``);
- ``instrument()`` once per process, which ``sojourn run mini …`` does for you;
- ``attach(agent)`` for one agent built by hand.

Its requests are told by the patches of openai and litellm, which ``sojourn.init`` makes; here they are only
joined: what mini sends again is the same logical request.

An agent, its model and its environment get a subclass of their own class each,
with the same name (see ``overlay``), so that ``isinstance`` and ``serialize()`` say what they said,
and copies act on themselves. Everything the user's code raises passes unchanged; nothing of ours
is ever raised into an agent. mini is not imported before it is needed. Checked with 2.0.0 and 2.4.6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import sojourn
from sojourn.commandline import command_class
from sojourn.outgoing import OneRequest

from .overlay import Around, lay, lift, lift_all
from .patches import Patches
from .scope import enter, fault, leave

__all__ = ["DefaultAgent", "InteractiveAgent", "attach", "detach", "instrument", "uninstrument", "wrap"]  # noqa: F822

_running: ContextVar[frozenset[int]] = ContextVar("sojourn_mini_running", default=frozenset())
_executing: ContextVar[frozenset[int]] = ContextVar("sojourn_mini_executing", default=frozenset())

_patches = Patches()


def attach(agent: Any) -> Any:
    """Wrap ``run``, its model's ``query`` and its environment's ``execute`` for this agent; returns it.

    Repeating it is harmless. Objects that refuse another class are left as they are. Copies of the agent are
    attached too; one read from a pickle is not, unless ``instrument`` was called in the process that runs it.
    """
    _lay(agent, "run", _in_program)
    _attach_parts(agent)
    return agent


def detach(agent: Any) -> Any:
    """Undo ``attach`` for one agent, its model and its environment; returns it."""
    for owner, _, _ in ((agent, "run", _in_program), *_parts(agent)):
        lift(owner)
    return agent


def instrument() -> None:
    """Attach to every agent made or run from now on in this process. Idempotent; imports mini.

    Where this mini has no ``DefaultAgent`` with ``run``, it is left untouched.
    """
    patch()


def uninstrument() -> None:
    """Undo ``instrument`` and every ``attach``, for agents that exist already too.

    What somebody else put above our patch stays; ours then does nothing below it.
    """
    _patches.undo()
    lift_all()


def patch() -> bool:
    """``instrument``, for ``sojourn.init``. False where mini looks unfamiliar."""
    from minisweagent.agents.default import DefaultAgent as agent_class

    if not {"__init__", "run"} <= vars(agent_class).keys():
        return False
    _patches.put(agent_class, "__init__", _attaching)
    _patches.put(agent_class, "run", _running_in_program)
    return True


unpatch = uninstrument


def wrap(target: Any) -> Any | None:
    """``attach``, for ``sojourn.wrap``. ``None`` where it is no agent of mini's."""
    if not all(hasattr(target, name) for name in ("run", "model", "env")):
        return None
    return attach(target)


def __getattr__(name: str) -> Any:
    """``DefaultAgent`` and ``InteractiveAgent``, made when first asked for: that imports mini."""
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


def _running_in_program(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _patches.active:
            return original(self, *args, **kwargs)
        _attach_parts(self)  # made by a copy or a pickle, it was never initialised
        return _in_program(self, functools.partial(original, self), args, kwargs)

    return run


def _in_program(agent: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``run`` inside a program of its own, unless this run has one already."""
    running = _running.get()
    if id(agent) in running:
        return run(*args, **kwargs)
    kind = type(agent).__name__
    # mini-extra's batch runs name their agents after the instance.
    name = getattr(agent, "instance_id", None) or kind
    scope = enter(lambda: sojourn.program(str(name), agent_type=kind))
    token = _running.set(running | {id(agent)})
    try:
        result = run(*args, **kwargs)
    except BaseException as error:
        leave(scope, error)
        raise
    finally:
        _running.reset(token)
    leave(scope)
    return result


# ---- one command


def _in_tool_call(
    environment: Any, execute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``execute`` inside a tool call, unless it is called by an ``execute`` of this environment."""
    from minisweagent.exceptions import InterruptAgentFlow

    executing = _executing.get()
    if id(environment) in executing:
        return execute(*args, **kwargs)
    scope = enter(lambda: _tool_call(args[0] if args else kwargs.get("action")))
    token = _executing.set(executing | {id(environment)})
    try:
        output = execute(*args, **kwargs)
    except InterruptAgentFlow:
        # Submitted comes out of execute() when the agent finishes: the command itself went well.
        leave(scope)
        raise
    except BaseException as error:
        leave(scope, error)
        raise
    finally:
        _executing.reset(token)
    leave(scope, status=lambda: _status(output))
    return output


def _tool_call(action: Any) -> Any:
    fields = action if isinstance(action, Mapping) else {}
    command = fields.get("command")
    head = command_class(command) if isinstance(command, str) else None
    return sojourn.tool_call("bash", fields.get("tool_call_id"), tool_class=head)


def _status(output: Any) -> str:
    """mini reports timeouts and failures in the output; it does not raise them."""
    if not isinstance(output, Mapping):
        return "ok"
    problem = output.get("exception_info")
    if problem:
        return "timeout" if "timed out" in str(problem) else "error"
    return "nonzero" if output.get("returncode") else "ok"


# ---- one request


def _as_one_request(
    model: Any, query: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """mini tries again by itself, ten times; what is sent is told by the patches of openai and litellm."""
    with OneRequest():
        return query(*args, **kwargs)


# ---- wrapping


def _attach_parts(agent: Any) -> None:
    for owner, name, around in _parts(agent):
        _lay(owner, name, around)


def _parts(agent: Any) -> Iterator[tuple[Any, str, Around]]:
    environment = getattr(agent, "env", None)
    if environment is not None:
        yield environment, "execute", _in_tool_call
    model = getattr(agent, "model", None)
    # A model that switches between others (roulette) makes its requests through them.
    for each in (model, *(getattr(model, "models", None) or ())):
        if each is not None:
            yield each, "query", _as_one_request


def _lay(owner: Any, name: str, around: Around) -> None:
    try:
        lay(owner, name, around)
    except Exception:
        fault("attach_error")
