"""CrewAI 1.x: a crew or a flow is a program, an agent is a node, and tools are seen through the event bus.

The methods through which every run goes are wrapped, and the event bus's ``emit``: it is called where the
tool runs, while listeners are called later and in other threads. The patches of ``openai``, ``anthropic`` and
litellm report the requests.

A crew inside a crew, a flow or a tool call is a child program. A crew directly under
``with sojourn.program()`` is that program, unless another one runs in it. No exception of ours reaches a
crew. Checked with 1.0.0 and 1.15.30.
"""

from __future__ import annotations

import json
from asyncio import _get_running_loop
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import sojourn
from sojourn.errors import tool_status_of
from sojourn.monkey_patches import Patches
from sojourn.program import Program, current_context
from sojourn.user_hints import step_limit
from sojourn.valid_ids_and_names import agent_type_of

from .safe_scope import Scope, enter, guarded, inside, leave, set_status

_patches = Patches()

_runs: WeakKeyDictionary[Program, dict[str, object]] = WeakKeyDictionary()
"""The programs in which a crew or flow runs, and the ids of the model's tool calls that were reported."""
_crews: dict[int, list[Program]] = {}
"""``id()`` of a running crew → the programs of its runs. CrewAI 1.0 starts asynchronous tasks in threads with
a bare context."""
_calls: ContextVar[tuple[tuple[Any, str, Scope | None], ...]] = ContextVar("sojourn_crewai_calls", default=())
"""The tool calls that have begun in this context: the object that emitted the event, the tool, the scope."""


def patch() -> bool:
    """Wrap the methods. ``sojourn.instrumentation`` calls this. Returns False, without changes, if one of
    those that every release has is missing."""
    from crewai import Agent, Crew
    from crewai.events.event_bus import CrewAIEventsBus
    from crewai.flow.flow import Flow

    needed = ((Crew, "kickoff"), (Flow, "kickoff_async"), (Agent, "execute_task"), (CrewAIEventsBus, "emit"))
    if not all(callable(getattr(kind, name, None)) for kind, name in needed):
        return False
    for kind, name, around in (
        (Crew, "kickoff", _run),
        (Crew, "akickoff", _run),
        (Flow, "kickoff_async", _run),
        (Flow, "resume_async", _run),
        (Agent, "execute_task", _agent),
        (Agent, "aexecute_task", _agent),
        (Agent, "kickoff", _kickoff),
        (Agent, "kickoff_async", _agent),
        (CrewAIEventsBus, "emit", _emit),
    ):
        if callable(getattr(kind, name, None)):
            _patches.wrap_method(kind, name, around)
    return True


def unpatch() -> None:
    """Restore CrewAI's own methods. If another library patched a method after us, its patch stays."""
    _patches.undo()


def wrap(target: Any) -> None:
    """Return ``None``: the event bus is one for the process, so no crew can be instrumented alone."""


# ---- runs


def _program(owner: Any) -> AbstractContextManager[Any]:
    """Return the block for a run of this crew, flow or agent."""
    # With ``stream`` the method calls itself later, without it. An agent's executor is a flow too.
    streams = getattr(owner, "stream", False) is True
    if streams or any(kind.__name__.endswith("AgentExecutor") for kind in type(owner).__mro__):
        return nullcontext()
    return _in_program(owner)


@contextmanager
def _in_program(owner: Any) -> Iterator[None]:
    here = current_context.get()
    around = sojourn.current_program()
    if around is not None and around not in _runs and (here.tool_call is None or here.program is not around):
        manager: Any = around.here()
    else:
        name = getattr(owner, "name", None) or getattr(owner, "role", None) or type(owner).__name__
        name = agent_type_of(str(name).strip(), "crew")  # "crew": CrewAI's name for a crew without one
        manager = sojourn.program(name, agent_type=name, max_steps=_most_steps(owner))
    with manager as program:
        _runs[program] = {}
        runs = _crews.setdefault(id(owner), [])
        runs.append(program)
        try:
            yield
        finally:
            del _runs[program]
            runs.remove(program)
            if not runs:
                del _crews[id(owner)]


@guarded
def _most_steps(owner: Any) -> int | None:
    """Return the sum of the limits of the crew's tasks, or the agent's limit. Returns ``None`` if the user
    has not set all of them, since CrewAI's own default says little."""
    agents = [task.agent for task in getattr(owner, "tasks", ())] or [owner]
    own = [agent.max_iter for agent in agents if "max_iter" in getattr(agent, "model_fields_set", ())]
    return step_limit(sum(own)) if len(own) == len(agents) else None


# ---- agents


def _kickoff(agent: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _get_running_loop() is not None:
        return original(*args, **kwargs)  # a coroutine of ``kickoff_async``
    return _agent(agent, original, args, kwargs)


@contextmanager
def _node(agent: Any) -> Iterator[None]:
    """Run an agent as a node of its crew; without a crew, as a program."""
    around: AbstractContextManager[Any] = nullcontext()
    if sojourn.current_program() is None:
        runs = _crews.get(id(getattr(agent, "crew", None)), ())  # of two runs, nothing tells which it is
        around = runs[0].here() if len(runs) == 1 else _in_program(agent)
    before = _calls.get()
    with around, sojourn.step(str(agent.role).strip()):
        try:
            yield
        except BaseException as error:
            _end_calls(len(before), tool_status_of(error))
            raise
        _end_calls(len(before), "cancelled")


_run, _agent = inside(_program), inside(_node)


# ---- tool calls


def _emit(bus: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0] if args else kwargs.get("source")
    event = args[1] if len(args) > 1 else kwargs.get("event")
    kind = type(event).__name__
    if kind == "ToolUsageStartedEvent":
        _tool_started(source, event)
    elif kind == "ToolUsageFinishedEvent":
        _tool_ended(event, "ok" if getattr(event, "failure", None) is None else "error")
    elif kind == "ToolUsageErrorEvent":
        error = getattr(event, "error", None)
        _tool_ended(event, tool_status_of(error) if isinstance(error, BaseException) else "error")
    return original(*args, **kwargs)


@guarded
def _tool_started(source: Any, event: Any) -> None:
    calls, tool = _calls.get(), str(event.tool_name)
    if calls and calls[-1][0] is source and calls[-1][1] == tool:
        return  # a retry
    scope = enter(lambda: sojourn.tool_call(tool, _call_id(source, tool, event.tool_args)))
    _calls.set((*calls, (source, tool, scope)))


@guarded
def _tool_ended(event: Any, status: str) -> None:
    calls = _calls.get()
    place = next((i for i in reversed(range(len(calls))) if calls[i][1] == str(event.tool_name)), None)
    if place is not None:
        _end_calls(place + 1, "cancelled")
        _end_calls(place, status)


def _end_calls(begun: int, status: str) -> None:
    """End the tool calls of this context but for the ``begun`` outermost."""
    calls = _calls.get()
    if len(calls) > begun:
        _calls.set(calls[:begun])
        for _, _, scope in reversed(calls[begun:]):
            set_status(scope and scope.handle, str, status)
            leave(scope)


def _call_id(source: Any, tool: str, arguments: Any) -> str | None:
    """Return the model's id of a call that begins, from the last answer in its agent's messages. Events do
    not carry it. Returns ``None`` if the model wrote the call as text."""
    messages = getattr(getattr(source, "state", source), "messages", None) or ()
    answer = next((each for each in reversed(messages) if each.get("tool_calls")), None)
    program = sojourn.current_program()
    seen = _runs.get(program) if program is not None else None
    if answer is None or seen is None:
        return None
    for call in answer["tool_calls"]:
        function, mine = call["function"], object()
        given = function["arguments"]
        with suppress(ValueError):
            given = json.loads(given or "{}") if isinstance(given, str) else given
        # Another thread may begin an equal call of the answer, so the first to enter the id has it.
        if (function["name"], given) == (tool, arguments) and seen.setdefault(call["id"], mine) is mine:
            return str(call["id"])
    return None
