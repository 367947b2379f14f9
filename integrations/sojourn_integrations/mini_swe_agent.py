"""mini-swe-agent 2.x: one run is a program, one bash command a tool call of it.

Three ways in, none of which needs a change to mini:

- ``mini --agent-class sojourn_integrations.mini_swe_agent.InteractiveAgent`` (or ``.DefaultAgent``);
- ``instrument()`` once per process, which ``sojourn run mini …`` does for you;
- ``attach(agent)`` for one agent built by hand.

An agent, its model and its environment get a subclass of their own class each,
with the same name (see ``overlay``), so that ``isinstance`` and ``serialize()`` say what they said,
and copies act on themselves. Everything the user's code raises passes unchanged; nothing of ours
is ever raised into an agent. mini is not imported before it is needed. Checked with 2.0.0 and 2.4.6.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import sojourn
from sojourn.commandline import main_head
from sojourn.config import host_key
from sojourn.request import Turn
from sojourn.runtime import session

from .overlay import Around, lay, lift, lift_all
from .scope import enter, fault, leave, may_tell, takes_events

__all__ = ["DefaultAgent", "InteractiveAgent", "attach", "detach", "instrument", "uninstrument"]  # noqa: F822

_URL_VARIABLES = {
    "openai": ("OPENAI_BASE_URL", "OPENAI_API_BASE"),
    "hosted_vllm": ("HOSTED_VLLM_API_BASE",),
}
"""Where litellm looks for the server of a provider, if the model's settings name none."""

_ELSEWHERE = ("client", "fallbacks", "model_list", "use_litellm_proxy")
"""Settings of litellm with which a request may go to another server than the one named."""

_running: ContextVar[frozenset[int]] = ContextVar("sojourn_mini_running", default=frozenset())
_executing: ContextVar[frozenset[int]] = ContextVar("sojourn_mini_executing", default=frozenset())


class _Patch(NamedTuple):
    """A method of mini's class that ``instrument`` replaced."""

    owner: type
    ours: Callable[..., Any]
    original: Callable[..., Any]


_patches: dict[str, _Patch] = {}
_instrumented = False


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
    global _instrumented
    from minisweagent.agents.default import DefaultAgent as agent_class

    if getattr(agent_class, "run", None) is None:
        return
    for name, make in (("__init__", _attaching), ("run", _running_in_program)):
        current = getattr(agent_class, name)
        if name in _patches and _is_beneath(_patches[name].ours, current):
            continue
        patch = _Patch(agent_class, make(current), current)
        setattr(agent_class, name, patch.ours)
        _patches[name] = patch
    _instrumented = True


def uninstrument() -> None:
    """Undo ``instrument`` and every ``attach``, for agents that exist already too.

    What somebody else put above our patch stays; ours then does nothing below it.
    """
    global _instrumented
    _instrumented = False
    for name, patch in list(_patches.items()):
        if vars(patch.owner).get(name) is patch.ours:
            setattr(patch.owner, name, patch.original)
            del _patches[name]
    lift_all()


def patch() -> bool:
    """``instrument``, for ``sojourn.instruments.register``. False where mini looks unfamiliar."""
    instrument()
    return _instrumented


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


def _attaching(initialise: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialise)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if _instrumented:
            _attach_parts(self)

    return __init__


def _running_in_program(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _instrumented:
            return original(self, *args, **kwargs)
        _attach_parts(self)  # made by a copy or a pickle, it was never initialised
        return _in_program(self, functools.partial(original, self), args, kwargs)

    return run


def _is_beneath(ours: Callable[..., Any], current: Any) -> bool:
    """Whether ``current`` is ours, or wraps it as ``functools.wraps`` records. Markers would not tell: that
    copies them to the wrapper."""
    while current is not None and current is not ours:
        current = getattr(current, "__wrapped__", None)
    return current is ours


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
    leave(scope, status=_status(output))
    return output


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


def _told(model: Any, query: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    turn, kwargs = _with_turn(model, kwargs)
    try:
        return query(*args, **kwargs)
    except BaseException:
        if turn is not None:
            turn.failed()  # events that did arrive, as before a FormatError, are told by their numbers
        raise


def _with_turn(model: Any, kwargs: dict[str, Any]) -> tuple[Turn | None, dict[str, Any]]:
    """``kwargs`` with ours added below the user's, or unchanged where that must not or cannot be done."""
    turn = None
    try:
        # As mini joins them; so an extra_body given with the call hides that of the settings, as without us.
        theirs = {**(getattr(model.config, "model_kwargs", None) or {}), **kwargs}
        url = _server_url(model, theirs)
        if url is None or not may_tell(url) or not _has_room(theirs):
            return None, kwargs
        turn = Turn(session())
        body, headers = turn.parts(take=takes_events(url))
        extra_body = dict(theirs.get("extra_body") or {})
        for key, value in body.items():
            if key == "vllm_xargs":
                extra_body[key] = {**value, **(extra_body.get(key) or {})}
            else:
                extra_body.setdefault(key, value)
        extra_headers = theirs.get("extra_headers") or {}
        taken = {str(name).lower() for name in (*extra_headers, *(theirs.get("headers") or {}))}
        extra_headers = {**{k: v for k, v in headers.items() if k.lower() not in taken}, **extra_headers}
        ours = {"extra_body": extra_body, "extra_headers": extra_headers}
        return turn, {**kwargs, **{name: value for name, value in ours.items() if value}}
    except Exception:
        fault("inject_error")
        if turn is not None:
            turn.failed()
        return None, kwargs


def _has_room(settings: Mapping[str, Any]) -> bool:
    """Whether all of ours can be added. What cannot be merged forbids it, as does a context of the user's."""
    extra_body = settings.get("extra_body")
    for value in (extra_body, settings.get("extra_headers"), settings.get("headers")):
        if value is not None and not isinstance(value, Mapping):
            return False
    if settings.get("vllm_xargs") is not None:
        return False  # litellm lets it replace the whole of that in extra_body
    if {"extra_body", "vllm_xargs"} & set(settings.get("additional_drop_params") or ()):
        return False
    given = (extra_body or {}).get("vllm_xargs")
    return given is None or (isinstance(given, Mapping) and "agentic_context" not in given)


def _server_url(model: Any, settings: Mapping[str, Any]) -> str | None:
    """Where litellm will send the request; ``None`` where that is not certain.

    Its order: ``base_url``, ``api_base``, ``litellm.api_base``, the environment. But ``base_url`` means
    nothing to its Responses API, and which of the latter two comes first depends on the provider. So the two
    of either pair have to agree.
    """
    litellm = sys.modules.get("litellm")
    if any(settings.get(name) for name in _ELSEWHERE) or getattr(litellm, "model_fallbacks", None):
        return None
    if getattr(litellm, "use_litellm_proxy", None) or os.environ.get("USE_LITELLM_PROXY"):
        return None
    named = [settings.get("api_base")]
    if not _is_from(model, "minisweagent.models.litellm_response"):
        named.append(settings.get("base_url"))
    name = str(getattr(model.config, "model_name", ""))
    provider = settings.get("custom_llm_provider") or name.partition("/")[0]
    found = [getattr(litellm, "api_base", None), *map(os.environ.get, _URL_VARIABLES.get(str(provider), ()))]
    urls = [str(url) for url in (named if any(named) else found) if url]
    return urls[0] if len({host_key(url) for url in urls}) == 1 else None


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
        # Only these pass ``extra_body`` and ``extra_headers`` on; others would send them as they are.
        if _is_from(each, "minisweagent.models.litellm"):
            yield each, "query", _told


def _is_from(model: Any, module: str) -> bool:
    return any(base.__module__.startswith(module) for base in type(model).__mro__)


def _lay(owner: Any, name: str, around: Around) -> None:
    try:
        lay(owner, name, around)
    except Exception:
        fault("attach_error")
