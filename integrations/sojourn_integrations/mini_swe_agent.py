"""mini-swe-agent 2.x: one run is a program, one bash command a tool call of it.

Three ways in, none of which needs a change to mini:

- ``mini --agent-class sojourn_integrations.mini_swe_agent.InteractiveAgent`` (or ``.DefaultAgent``);
- ``instrument()`` once per process, which ``sojourn run mini …`` does for you;
- ``attach(agent)`` for one agent built by hand.

Methods are wrapped on the *instances*, so that classes, ``isinstance`` and
``serialize()`` stay what they were. Everything the user's code raises passes
unchanged; nothing of ours is ever raised into an agent. mini is not imported
before it is needed. Checked with 2.0.0 and 2.4.6.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import sojourn

from .scope import enter, fault, leave, may_tell
from sojourn.commandline import main_head

__all__ = ["DefaultAgent", "InteractiveAgent", "attach", "detach", "instrument", "uninstrument"]  # noqa: F822

_ORIGINAL = "__sojourn_original__"
"""Marks our wrappers and leads back to what they wrap."""

_URL_KEYS = ("api_base", "base_url")
_URL_VARIABLES = {
    "openai": ("OPENAI_BASE_URL", "OPENAI_API_BASE"),
    "hosted_vllm": ("HOSTED_VLLM_API_BASE",),
}
"""Where litellm looks for the server of a provider, if the model's settings name none."""

_running: ContextVar[frozenset[int]] = ContextVar("sojourn_mini_running", default=frozenset())
_attached: weakref.WeakSet[Any] = weakref.WeakSet()


def attach(agent: Any) -> Any:
    """Wrap ``run``, its model's ``query`` and its environment's ``execute`` on this agent; returns it.

    Repeating it is harmless. Objects that refuse new attributes are left as they are.
    """
    _wrap(agent, "run", lambda original: _program_around(agent, original))
    _attach_parts(agent)
    return agent


def detach(agent: Any) -> Any:
    """Undo ``attach`` for one agent, its model and its environment; returns it."""
    for owner, name in _wrappable(agent):
        if hasattr(vars(owner).get(name), _ORIGINAL):
            delattr(owner, name)
        _attached.discard(owner)
    return agent


def instrument() -> None:
    """Attach to every agent made from now on in this process. Idempotent; imports mini.

    Where this mini has no ``DefaultAgent`` with ``run``, it is left untouched.
    """
    from minisweagent.agents.default import DefaultAgent as agent_class

    initialise, run = agent_class.__init__, getattr(agent_class, "run", None)
    if run is None or hasattr(run, _ORIGINAL):
        return

    @functools.wraps(initialise)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        _attach_parts(self)

    @functools.wraps(run)
    def run_in_program(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _in_program(self, functools.partial(run, self), args, kwargs)

    setattr(__init__, _ORIGINAL, initialise)
    setattr(run_in_program, _ORIGINAL, run)
    agent_class.__init__, agent_class.run = __init__, run_in_program  # type: ignore[method-assign]


def uninstrument() -> None:
    """Undo ``instrument`` and every ``attach``, for agents that exist already too."""
    agent_class = getattr(sys.modules.get("minisweagent.agents.default"), "DefaultAgent", None)
    for name in ("__init__", "run"):
        original = getattr(getattr(agent_class, name, None), _ORIGINAL, None)
        if original is not None:
            setattr(agent_class, name, original)
    for owner in list(_attached):
        for name in ("run", "query", "execute"):
            if hasattr(vars(owner).get(name), _ORIGINAL):
                delattr(owner, name)
        _attached.discard(owner)


def patch() -> bool:
    """``instrument``, for ``sojourn.instruments.register``. False where mini looks unfamiliar."""
    instrument()
    return hasattr(sys.modules["minisweagent.agents.default"].DefaultAgent.run, _ORIGINAL)


unpatch = uninstrument


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


def _program_around(agent: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _in_program(agent, original, args, kwargs)

    return run


def _in_program(agent: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``run`` inside a program of its own, unless this run has one already."""
    running = _running.get()
    if id(agent) in running:
        return run(*args, **kwargs)
    name = type(agent).__name__
    scope = enter(lambda: sojourn.program(name, agent_type=name))
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


def _tool_call_around(original: Callable[..., Any]) -> Callable[..., Any]:
    from minisweagent.exceptions import InterruptAgentFlow

    @functools.wraps(original)
    def execute(action: Any, *args: Any, **kwargs: Any) -> Any:
        scope = enter(lambda: _tool_call(action))
        try:
            output = original(action, *args, **kwargs)
        except InterruptAgentFlow:
            # Submitted comes out of execute() when the agent finishes: the command itself went well.
            leave(scope)
            raise
        except BaseException as error:
            leave(scope, error)
            raise
        leave(scope, status=_status(output))
        return output

    return execute


def _tool_call(action: Any) -> Any:
    fields = action if isinstance(action, Mapping) else {}
    command = fields.get("command")
    head = main_head(command) if isinstance(command, str) else None
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


def _request_around(model: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def query(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **_with_request_parts(model, kwargs))

    return query


def _with_request_parts(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` with ours merged below the user's, or unchanged where that must not or cannot be done."""
    try:
        own = getattr(model.config, "model_kwargs", None) or {}
        url = _server_url(str(getattr(model.config, "model_name", "")), {**own, **kwargs})
        if url is None or not may_tell(url):
            return kwargs
        body, headers = sojourn.request_parts()
        # mini merges its settings and the arguments one level deep; what that would lose is merged here.
        merged = dict(kwargs)
        for name, ours in (("extra_body", body), ("extra_headers", headers)):
            merged[name] = _merge(_merge(ours, own.get(name) or {}), kwargs.get(name) or {})
        return merged
    except Exception:
        fault("inject_error")
        return kwargs


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` wins; mappings in both are merged in turn, so ``vllm_xargs`` keeps the keys of either."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _server_url(model_name: str, settings: Mapping[str, Any]) -> str | None:
    for key in _URL_KEYS:
        if settings.get(key):
            return str(settings[key])
    for variable in _URL_VARIABLES.get(model_name.partition("/")[0], ()):
        if os.environ.get(variable):
            return os.environ[variable]
    return None


# ---- wrapping


def _attach_parts(agent: Any) -> None:
    for owner, name in _wrappable(agent):
        if name == "execute":
            _wrap(owner, name, _tool_call_around)
        elif name == "query":
            _wrap(owner, name, functools.partial(_request_around, owner))


def _wrappable(agent: Any) -> Iterator[tuple[Any, str]]:
    yield agent, "run"
    environment = getattr(agent, "env", None)
    if environment is not None:
        yield environment, "execute"
    model = getattr(agent, "model", None)
    # A model that switches between others (roulette) makes its requests through them.
    for each in (model, *(getattr(model, "models", None) or ())):
        if _speaks_litellm(each):
            yield each, "query"


def _speaks_litellm(model: Any) -> bool:
    """Only these pass ``extra_body`` and ``extra_headers`` on; others would send them as they are."""
    return any(base.__module__.startswith("minisweagent.models.litellm") for base in type(model).__mro__)


def _wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    try:
        original = getattr(owner, name)
        if hasattr(original, _ORIGINAL) and name in vars(owner):
            return
        wrapper = around(original)
        setattr(wrapper, _ORIGINAL, original)
        setattr(owner, name, wrapper)
        _attached.add(owner)
    except Exception:
        fault("attach_error")
