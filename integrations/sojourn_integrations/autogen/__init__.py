"""AutoGen 0.7 (autogen-agentchat): reports teams and agents as programs, without changes to their code.

    sojourn.init("http://127.0.0.1:8000")           # before or after importing AutoGen
    team = sojourn.wrap(team)                       # or: only this team or agent, with all its parts

What is reported
- A **program** is the outermost run of a team or an agent: ``run``, ``run_stream`` or an agent's
  ``on_messages_stream``. The program's name and type are those of the team or agent. Inside
  ``with sojourn.program():`` a run is part of that program instead. Use such a block around several runs
  that continue one conversation. Without a block, each call of ``team.run()`` is a program of its own, even
  if it continues the previous run.
- A **node** is an agent's turn in the team, with any number of requests. It has the agent's name. Agents of a
  team inside a team or inside a ``SocietyOfMindAgent`` have names like ``inner/alice``. The requests with
  which a ``SelectorGroupChat`` or ``MagenticOneGroupChat`` picks the next agent belong to no node.
- A **tool call** is what an ``AssistantAgent`` executes, handoffs (``transfer_to_bob``) included, with the
  model's call id. AutoGen turns a tool's exception into a result; such a call ends as ``error``, or as
  ``timeout`` for a ``TimeoutError``. The code of a ``CodeExecutorAgent`` is a call of the tool ``code``. Its
  tool class is the language, or for shell code the main command. A human's approval of the code is part of
  the call.
- ``AgentTool``, ``TeamTool`` and agents that a tool's code runs are **child programs** of that tool call.
- The **graph** is reported at the start: see ``team_graph``.

``docs/frameworks/autogen.md`` lists the limits. A runtime that was started inside *another* program keeps the
other program's context: the team's requests outside of any turn, such as a selector's, count for the other
program. An object wrapped with ``sojourn.wrap`` stays wrapped: if one of its agents is also in another team,
the agent's turns there are reported too, each as a program.

If ``_execute_tool_call`` raises, AutoGen's agent waits for ever. So all code of ours is guarded, and the
user's code is called exactly once, outside of the guards.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from sojourn.monkey_patches import Patches
from sojourn.program import remove_resolver
from sojourn.scoped_functions import GeneratorScope, stepped

from sojourn_integrations.safe_scope import count_error, guarded

from . import run_scopes, tool_calls

_patches = Patches()
_wrapped_classes: dict[type, type] = {}
"""Class of a wrapped object → its subclass with our methods."""

# ---- on, off, one object


def patch() -> bool:
    """Patch AutoGen's classes. Returns False, without changes, if one of them lacks a method to patch."""
    targets = list(_targets())
    if not all(callable(vars(kind).get(name)) for kind, name, _ in targets):
        return False
    for kind, name, around in targets:
        _replace(kind, name, around)
    run_scopes.restore_resolver()
    return True


def unpatch() -> None:
    """Restore AutoGen's own functions. If another library patched a function after us, its patch stays, and
    our function beneath that patch only calls AutoGen's."""
    _patches.undo()
    if not _wrapped_classes:
        remove_resolver(run_scopes.resolve)


def wrap(target: Any) -> Any | None:
    """Instrument one team or agent, with its agents, tools and model clients, and return it.

    Each of these objects gets a subclass of its class, so that other objects of the class stay unchanged.
    Returns ``None`` for an object that is neither a team nor an agent.
    """
    from autogen_agentchat.agents import BaseChatAgent
    from autogen_agentchat.teams import BaseGroupChat

    if not isinstance(target, (BaseGroupChat, BaseChatAgent)):
        return None
    for each in _parts(target, set()):
        try:
            _wrap_in_place(each)
        except Exception:
            count_error("attach_error")
    return target


def _targets() -> Iterator[tuple[type, str, Any]]:
    """Yield the functions to patch. Each has an async function ``around(original, args, kwargs)`` to run in
    its place; a stream has a function that returns the scope of the object's run or turn, if one begins."""
    from autogen_agentchat import agents
    from autogen_agentchat.teams import BaseGroupChat
    from autogen_core.tools import BaseTool, FunctionTool

    yield BaseGroupChat, "run_stream", _begin_team
    yield agents.BaseChatAgent, "run", _agent_run
    yield agents.BaseChatAgent, "run_stream", _begin_turn
    for kind in (
        agents.BaseChatAgent,
        agents.AssistantAgent,
        agents.CodeExecutorAgent,
        agents.SocietyOfMindAgent,
        agents.UserProxyAgent,
        agents.MessageFilterAgent,
    ):
        yield kind, "on_messages_stream", _begin_turn
    yield agents.AssistantAgent, "_execute_tool_call", tool_calls.execute_tool_call
    yield agents.CodeExecutorAgent, "execute_code_block", tool_calls.execute_code_block
    yield BaseTool, "run_json", tool_calls.run_json
    yield FunctionTool, "run", tool_calls.run_function


def _replace(kind: type, name: str, around: Any) -> None:
    _patches.put(kind, name, lambda theirs: _wrapped(theirs, around, lambda: _patches.active))


def _wrapped(theirs: Any, around: Any, active: Callable[[], bool]) -> Any:
    """Return the wrapper of AutoGen's function ``theirs``; while ``active()`` is false, it reports nothing.
    The wrapper of a static method is a static method."""
    if isinstance(theirs, staticmethod):
        return staticmethod(_wrapped(theirs.__func__, around, active))
    if inspect.isasyncgenfunction(theirs):

        def begin(owner: Any, *_: Any, **__: Any) -> Any:
            return (around(owner) if active() else None) or GeneratorScope(nullcontext)

        return functools.wraps(theirs)(stepped(theirs, begin))

    @functools.wraps(theirs)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await (around(theirs, args, kwargs) if active() else theirs(*args, **kwargs))

    return call


def _patch_user_classes(agents: Any) -> None:
    """Patch ``on_messages_stream`` in the user's own agent classes that define it. Called when a team begins
    a run, since these classes are not known earlier."""
    from autogen_agentchat.base import ChatAgent

    name = "on_messages_stream"
    for kind in {base for agent in agents for base in type(agent).__mro__}:
        own = vars(kind).get(name)
        if own is None or not inspect.isasyncgenfunction(own) or not issubclass(kind, ChatAgent):
            continue
        if _patches.active and kind not in _wrapped_classes.values():
            _replace(kind, name, _begin_turn)


# ---- runs and turns


@guarded
def _begin_team(team: Any) -> run_scopes.RunScope | None:
    if _patches.active:
        _patch_user_classes(team._participants)
    return run_scopes.begin_team(team)


@guarded
def _begin_turn(agent: Any) -> run_scopes.RunScope | None:
    return run_scopes.begin_turn(agent)


async def _agent_run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scope = _begin_turn(args[0])
    if scope is None:
        return await original(*args, **kwargs)
    try:
        with scope:
            result = await original(*args, **kwargs)
    except BaseException as error:
        scope.close(error)
        raise
    scope.close()
    return result


# ---- one object


def _parts(target: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the team or agent and, recursively, its agents, tools and model clients, each once."""
    if target is None or id(target) in seen:
        return
    seen.add(id(target))
    yield target
    for name in ("_participants", "_workbench", "_tools"):
        found = getattr(target, name, None)
        for each in found if isinstance(found, (list, tuple)) else ():
            yield from _parts(each, seen)
    for name in ("_team", "_agent", "_wrapped_agent", "_model_client"):
        yield from _parts(getattr(target, name, None), seen)


def _wrap_in_place(target: Any) -> None:
    kind = type(target)
    client = getattr(target, "_client", None)
    if client is not None:
        _wrap_client(client)
    if kind in _wrapped_classes.values():
        return
    if kind not in _wrapped_classes:
        body: dict[str, Any] = {}
        for base, name, around in _targets():
            # Of several definitions of on_messages_stream the nearest one counts.
            if issubclass(kind, base) and name not in body:
                body[name] = _wrapped(inspect.getattr_static(kind, name), around, lambda: True)
        if not body:
            return
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        metaclass: Any = type(kind)
        _wrapped_classes[kind] = metaclass(kind.__name__, (kind,), {**body, **names})
    target.__class__ = _wrapped_classes[kind]


def _wrap_client(client: Any) -> None:
    """Wrap the ``openai`` client inside an AutoGen model client, so that its requests carry the program."""
    from sojourn import openai

    if type(client).__module__.partition(".")[0] == "openai":
        openai.wrap(client)
