"""Finds or creates the program of each run of the OpenAI Agents SDK.

Inside ``with sojourn.program()`` the run *is* that program. Inside another run, or in a tool call of any
framework, the run is a child program. Runs with ``session=`` belong to a conversation. All runs of a
conversation are one program, since a program's end between two runs would release KV that the next run needs.

When the session object is garbage-collected, a conversation in memory ends. A stored conversation only stops
its heartbeats, since a later request may load it again. (A conversation in a file has the same program id in
every process of this machine.) ``conversation_keys`` tells which session objects are one conversation. Some
sessions get their id from a server in their first run. Until then the conversation is known by its session
object alone.

A run that stops for an approval keeps its program open, without heartbeats. The resumed run continues the
program.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from contextlib import suppress
from hashlib import sha256
from typing import Any
from weakref import ReferenceType, ref

import sojourn
from sojourn import Aeg
from sojourn.program import Program, add_resolver, find_context, live_context, process_programs
from sojourn.runtime import session
from sojourn.user_hints import step_limit

from sojourn_integrations.program_cache import ProgramCache
from sojourn_integrations.safe_scope import guarded

from .agent_graph import graph_of
from .conversation_keys import conversation_key, object_key
from .run_hooks import Run, resolve, running

_conversations = ProgramCache()
_interrupted = ProgramCache(status="cancelled")


@guarded
def begin(agent: Any, given: Any, conversation: Any, max_turns: Any) -> Run:
    """Enter a run of ``agent`` and return it. ``given``: the run's input. ``conversation``: the run's session
    object, if any. ``max_turns``: the run's limit. Returns ``None`` after an internal error. Never raises."""
    add_resolver(resolve)
    run = _run_for(agent, given, conversation)
    if run.owned and run.conversation is None:  # a conversation goes on after the run
        # A run that is resumed has the limit of its state.
        max_turns = step_limit(getattr(given, "_max_turns", max_turns))
        run.program.steps_left = max_turns and max(0, max_turns - getattr(given, "_current_turn", 0))
    run.program.start()
    run.enter()
    return run


@guarded
def end(run: Run, status: str, result: Any = None) -> None:
    """End a run with ``status``. ``result``: the run's result, if any. The program stays open if it belongs
    to a conversation or to the user's code, or if ``result`` waits for an approval. Never raises."""
    run.stop_calls()
    if not run.owned:
        return
    if run.conversation is not None:
        _conversations.set_run_status(_current_key(run), status)
    elif status != "ok" or not _keep_interrupted(run, result):
        _interrupted.end_children(run.program)
        run.program.end(status)


def end_kept_programs() -> None:
    """End the programs that are kept between runs."""
    _interrupted.clear()
    _conversations.clear()


def _run_for(agent: Any, given: Any, conversation: Any) -> Run:
    here, _ = find_context(session().counters)
    outer, program, name = running.get(), here.program, str(agent.name)
    graph = graph_of(agent)
    inside = program is not None and (
        here.tool_call is not None
        or (outer is not None and outer.program is program)
        # A program that only a resolver knows belongs to another framework's run.
        or (live_context().program is not program and program not in process_programs)
    )
    resumed = _resumed(name, given)
    if resumed is not None:
        return _with_graph(Run(resumed, owned=True, agent=name), graph)
    if program is not None and not inside:
        return _with_graph(Run(program, owned=False), graph)
    fresh = sojourn.program(name, agent_type=name)
    known_by = None if conversation is None or inside else conversation_key(conversation)
    reference = _weak(conversation)
    if known_by is None or (known_by.by_object and reference is None):
        # Without a weak reference nothing tells when another object has the same id().
        return _with_graph(Run(fresh.make(), owned=True, agent=name), graph)
    if not known_by.by_object:  # the user's code may have used the session, which then got its id
        _conversations.rename(object_key(conversation), known_by.key)
    kept = _conversations.find(known_by.key)
    if kept is None:
        kept = sojourn.program(name, id=known_by.program_id, agent_type=name).make()
        _conversations.keep(known_by.key, kept)
    if reference is not None:  # else it is kept until the cache is full
        _conversations.add_holder(known_by.key, conversation, ends=known_by.by_object)
    run = Run(kept, owned=True, agent=name, conversation=known_by.key)
    run.session = reference
    return _with_graph(run, graph)


def _with_graph(run: Run, graph: Aeg | None) -> Run:
    """Report ``graph``, if any, as the graph of the run's program and return ``run``."""
    if graph is not None:
        run.program.set_graph(graph)
    return run


def _weak(conversation: Any) -> ReferenceType[Any] | None:
    with suppress(TypeError):
        return ref(conversation)
    return None


def _current_key(run: Run) -> Hashable:
    """Return the key of the run's conversation. If the session got its id during this run, first move the
    conversation's program to a key with this id."""
    conversation = None if run.session is None else run.session()
    if conversation is None or run.conversation != object_key(conversation):
        return run.conversation
    known_by = conversation_key(conversation)
    if not known_by.by_object:
        _conversations.rename(run.conversation, known_by.key)
        run.conversation = known_by.key
    return run.conversation


def _keep_interrupted(run: Run, result: Any) -> bool:
    ids = _pending_call_ids(getattr(result, "interruptions", None))
    asked = _digest(getattr(result, "input", None)) if ids else b""
    for id in ids:
        # The key has the agent's name, since a nested run and the run around it wait for the same approval.
        # The key has the input, since models that number their calls use the same call ids in every run.
        _interrupted.keep((run.agent, id, asked), run.program)
    if ids:
        run.program.pause_heartbeats()
    return bool(ids)


def _resumed(agent: str, given: Any) -> Program | None:
    """Return the waiting program that the run state ``given`` resumes, even after a round trip of the state
    through JSON. Returns ``None`` if no such program waits."""
    ask = getattr(given, "get_interruptions", None)
    found = None
    if callable(ask):
        asked = _digest(getattr(given, "_original_input", None))
        for id in _pending_call_ids(ask()):
            found = _interrupted.take((agent, id, asked)) or _interrupted_like(agent, id) or found
    if found is not None:
        found.resume_heartbeats()
    return found


def _interrupted_like(agent: str, id: str) -> Program | None:
    """Return the program of ``agent`` that waits for the tool call ``id``, if there is exactly one. The input
    is not compared, since it may change in a round trip through JSON."""
    key = _interrupted.find_key(lambda key: key[:2] == (agent, id))
    return None if key is None else _interrupted.take(key)


def _digest(asked: Any) -> bytes:
    """Return a hash of a run's input; empty if the input is not JSON. The hash does not leave this
    process."""
    try:
        text = json.dumps(asked, sort_keys=True, default=str)
    except (TypeError, ValueError):  # not JSON
        return b""
    return sha256(text.encode(errors="replace")).digest()


def _pending_call_ids(interruptions: Any) -> list[str]:
    """Return the ids of the tool calls that wait for approval."""
    raw = [getattr(item, "raw_item", None) for item in interruptions or ()]
    ids = [each.get("call_id") if isinstance(each, dict) else getattr(each, "call_id", None) for each in raw]
    return [id for id in ids if isinstance(id, str)]
