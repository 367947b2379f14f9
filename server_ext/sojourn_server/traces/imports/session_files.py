"""Import of session files of coding agents (Claude Code, Codex, OpenCode, Pi) and of logs of OpenAI requests.

The files have texts, of which only lengths, the names of tools and the executables of shell commands are
read. A call starts with the last input before its first output: a person's message or a tool's result. The
files do not say how long a person took to permit a tool. A tool whose own duration is known or negligible
asked a person if its result took ``_APPROVAL_S`` longer.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from sojourn.shell_command import command_class, command_of, is_shell_tool

from ..trace_file import read_bytes
from ..trace_schema import TraceError
from .recorded_calls import (
    ImportResult,
    RecordedCall,
    RecordedProgram,
    RecordedTool,
    TokenUsage,
    seconds,
    to_trace,
    usage_of,
)

_APPROVAL_S = 2.0
_INSTANT_TOOLS = frozenset({"edit", "multiedit", "notebookedit", "write", "read", "apply_patch"})
"""Lower-case names of tools that take milliseconds; a longer wait is a person's."""
_ASKING_TOOLS = frozenset({"askuserquestion", "exitplanmode", "request_user_input", "question"})
"""Lower-case names of tools that ask a person."""


@dataclass(slots=True, eq=False)
class _Session(RecordedProgram):
    """A conversation, built from its entries in their order. Times are seconds."""

    context_changed: bool = False
    """Whether the next prompt does not continue the previous one, as after a compaction."""
    open_tools: dict[str, tuple[str, str | None, float]] = field(default_factory=dict)
    call_by_id: dict[str, RecordedCall] = field(default_factory=dict)
    input_s: float = 0.0
    began_s: float | None = None
    output_s: float = 0.0
    written_by: str = ""
    """Claude Code's id of the session whose line was the last."""

    def add_input(self, at_s: float, person: bool = False) -> None:
        self.input_s = max(self.input_s, at_s)
        if person and self.calls:
            self.calls[-1].person = True

    def add_output(self, at_s: float, start_s: float | None = None) -> None:
        """Note output of a call, which started at ``start_s`` if recorded. Its counts may follow later."""
        if self.began_s is None:
            ended_s = self.calls[-1].end_s if self.calls else 0.0
            known_s = max(self.input_s, ended_s) if start_s is None else start_s
            self.began_s = min(at_s, known_s or at_s)
        self.output_s = at_s

    def add_call(
        self, call_id: str, usage: TokenUsage, model: str | None, base: RecordedCall | None = None
    ) -> RecordedCall:
        """Add the call of the output, or recount a known one. It continues ``base``, if the file says so."""
        calls, call = self.calls, self.call_by_id.get(call_id)
        if call is None:
            began_s = self.output_s if self.began_s is None else self.began_s
            call = self.call_by_id[call_id] = RecordedCall(began_s, self.output_s, usage)
            if self.context_changed:
                call.kept_tokens = usage.cached or 0
            elif base is not None and calls and base is not calls[-1]:
                call.kept_tokens = base.usage.prompt + base.usage.output
            calls.append(call)
            self.context_changed = False
        call.end_s, call.usage, self.began_s = max(call.end_s, self.output_s), usage, None
        self.model = model
        return call

    def start_tool(self, tool_id: str, name: str, arguments: Any, at_s: float) -> None:
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = msgspec.json.decode(arguments)
        line = command_of(arguments) if isinstance(arguments, dict) and is_shell_tool(name) else None
        self.open_tools[tool_id] = name, command_class(line or ""), at_s

    def end_tool(self, tool_id: str, at_s: float, own_s: float | None = None, asked: bool = False) -> float:
        """Add the tool; return its start. It ran for ``own_s``; ``asked``: it waited for a person."""
        name, command, start_s = self.open_tools.pop(tool_id, (None, None, at_s))
        if name is not None:
            own_s = 0.0 if name.lower() in _INSTANT_TOOLS else own_s
            ended_s = max(start_s, at_s)
            if own_s is not None and at_s - max(start_s, self.input_s) - own_s > _APPROVAL_S:
                asked, ended_s = True, start_s + own_s
            asked = asked or name.lower() in _ASKING_TOOLS
            self.tools.append(RecordedTool(name, start_s, ended_s, command, asked))
            self.add_input(at_s)
        return start_s


class SessionReader:
    """Reads the files of one client. Subclasses add an entry: a line of JSON, or a row of a database."""

    source: ClassVar[str]
    patterns: ClassVar[Sequence[str]] = "*.jsonl", "*.jsonl.gz"

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        self._sessions: dict[str, _Session] = {}
        self._known: dict[Any, tuple[_Session, RecordedCall | None]] = {}
        """What later entries continue: a file, an entry or messages → (session, its call there)."""

    @classmethod
    def read(cls, paths: Sequence[str | Path]) -> ImportResult:
        """Return the programs of all sessions in files and folders. Entries that cannot be read are left out;
        a note counts them and names the first. Raises ``TraceError`` if no entry is a model call."""
        self, bad = cls(), []
        for path in map(Path, paths):
            inside = chain.from_iterable(map(path.rglob, cls.patterns))
            files = sorted(inside) if path.is_dir() else [path]
            for file, place, entry in chain.from_iterable(map(self._entries, files)):
                try:
                    self._add(msgspec.json.decode(entry) if isinstance(entry, bytes) else entry, str(file))
                except (TypeError, ValueError, AttributeError, LookupError, RecursionError) as error:
                    known = isinstance(error, KeyError) and str(file) not in error.args
                    bad.append(f"{file}, {place}: {f'has no {error}' if known else 'no entry of a session'}")
        if bad:
            self.left_out[f"entries left out, the first is {bad[0]}"] = len(bad)
        sessions = self._sessions.values()
        self.left_out["tool calls without a result left out"] = sum(len(one.open_tools) for one in sessions)
        return to_trace(sessions, cls.source, self.left_out, paths)

    def _entries(self, path: Path) -> Iterator[tuple[Path, str, Any]]:
        for number, line in enumerate(read_bytes(path).splitlines(), start=1):
            if line.strip():
                yield path, f"line {number}", line

    def _add(self, entry: Any, path: str) -> None:
        raise NotImplementedError

    def _session(self, session_id: str, parent: _Session | None = None, role: str | None = None) -> _Session:
        session = self._sessions.setdefault(str(session_id), _Session(str(session_id)))
        session.parent = session.parent or parent
        session.agent_type = session.agent_type or role
        session.group = f"{self.source}/{session.agent_type}" if session.agent_type else self.source
        return session

    def _usage(self, counts: dict[str, Any] | None) -> TokenUsage | None:
        """Return the counts of a ``usage`` object. OpenAI's prompts include cached tokens. Those of Anthropic
        and Pi exclude cached and created ones, which have names of their own."""
        counts = counts or {}
        usage = usage_of(counts | (counts.get("prompt_tokens_details") or {}))
        self.left_out["model calls without token counts left out"] += usage is None
        said = counts.keys() & {"prompt_tokens", "cache_read_input_tokens", "cacheRead"}
        return usage.with_cache() if usage and said and "prompt_tokens" not in said else usage


class ClaudeCodeReader(SessionReader):
    """Sessions of Claude Code: ``~/.claude/projects``. A message has several lines; the last has its counts.
    ``parentUuid`` makes a tree: a line that continues an older one is a rewind, or a fork if another session
    wrote the newer ones. A resumed session repeats lines. Those of a sub-agent are in a file of their own, in
    its parent's (``isSidechain``), or in both."""

    source = "claude-code"

    def __init__(self) -> None:
        super().__init__()
        self._chars: Counter[str] = Counter()

    def _add(self, entry: Any, path: str) -> None:
        uuid = entry.get("uuid")
        if uuid is None or uuid in self._known:
            return
        above, agent = entry.get("parentUuid"), entry.get("agentId")
        session, call = self._known.get(above, (None, None))
        if agent or session is None:
            session = self._session(entry["sessionId"])
            if agent or entry.get("isSidechain"):
                role = entry.get("attributionAgent") if agent else "sidechain"
                session = self._session(f"{entry['sessionId']}/{agent or uuid}", session, role)
        elif call not in (None, *session.calls[-1:]) and entry["sessionId"] != session.written_by:
            taken = entry["sessionId"] in self._sessions
            session = self._session(f"{entry['sessionId']}/{uuid}" if taken else entry["sessionId"])
        session.written_by = entry["sessionId"]
        compacted = entry.get("subtype") == "compact_boundary"
        rewound = above is None and entry["type"] == "user" and bool(session.calls)
        session.context_changed |= compacted or rewound
        self._known[uuid] = session, call
        at_s, message = seconds(entry["timestamp"]), entry.get("message") or {}
        blocks = message["content"] if isinstance(message.get("content"), list) else []
        if compacted:
            self.left_out["compactions: the call that wrote the summary is not in the file"] += 1
        elif entry["type"] == "user":
            self._add_input(entry, session, at_s, [one for one in blocks if one["type"] == "tool_result"])
        elif entry.get("isApiErrorMessage") or message.get("model") == "<synthetic>":
            self.left_out["error messages in place of an answer left out"] += 1
        elif entry["type"] == "assistant" and (usage := self._usage(message.get("usage"))):
            texts = (one.get("text") or one.get("thinking") or one.get("input") or "" for one in blocks)
            self._chars[message["id"]] += sum(len(str(said)) for said in texts)
            if message.get("stop_reason") is None:  # counted when the answer began, if no other line follows
                estimate = self._chars[message["id"]] // 4  # characters a token
                usage = usage._replace(output=max(usage.output, estimate))
            session.add_output(at_s)
            self._known[uuid] = session, session.add_call(message["id"], usage, message.get("model"), call)
            for block in blocks:
                if block["type"] == "tool_use":
                    session.start_tool(block["id"], block["name"], block.get("input"), at_s)

    def _add_input(self, entry: Any, session: _Session, at_s: float, results: list[Any]) -> None:
        told = entry.get("toolUseResult")
        facts, rejected = told if isinstance(told, dict) else {}, str(told).startswith("User rejected")
        own_ms = facts.get("durationMs")
        for block in results:
            own_s = own_ms / 1000 if isinstance(own_ms, (int, float)) else None
            start_s = session.end_tool(block["tool_use_id"], at_s, own_s, rejected)
            if agent := facts.get("agentId"):
                sub = self._session(f"{entry['sessionId']}/{agent}", session, facts.get("agentType"))
                sub.parent, sub.asked_s = session, start_s
        if not results:
            of_client = any(entry.get(name) for name in ("isMeta", "isCompactSummary", "isSidechain"))
            origin = (entry.get("origin") or {}).get("kind", "human")
            session.add_input(at_s, person=origin == "human" and not of_client)


class CodexReader(SessionReader):
    """Sessions of Codex: ``~/.codex/sessions``. A file is a thread; a fork begins with copied lines. A call
    ends with a ``token_usage_record``, in older files with an event ``token_count``, maybe repeated."""

    source = "codex"
    patterns = "rollout*.jsonl", "rollout*.jsonl.gz"

    def __init__(self) -> None:
        super().__init__()
        self._total: dict[str, Any] = {}
        """File → total tokens at its last ``token_count``, or ``None`` if it has usage records."""
        self._own_s: dict[str, float] = {}

    def _add(self, entry: Any, path: str) -> None:
        kind, payload, at_s = entry["type"], entry["payload"], seconds(entry["timestamp"])
        if kind == "session_meta":
            if path not in self._known:
                source = payload.get("source")
                subagent = source.get("subagent") if isinstance(source, dict) else None
                spawn = subagent.get("thread_spawn") or {} if isinstance(subagent, dict) else {}
                role = spawn.get("agent_role") or ("subagent" if subagent else None)
                parent = self._session(spawn["parent_thread_id"]) if spawn else None
                self._known[path] = self._session(payload["id"], parent, role), None
            return
        (session, _), what = self._known[path], payload.get("type")
        if kind == "compacted":
            session.context_changed = True
        elif kind == "turn_context":
            session.model = payload.get("model")
        elif kind == "token_usage_record":
            own = payload.get("thread_id", session.program_id) == session.program_id
            if own and (usage := self._usage(payload["usage"])):
                session.add_call(payload["response_id"], usage, session.model)
                self._total[path] = None
        elif what == "token_count" and payload.get("info"):
            total = payload["info"]["total_token_usage"]
            if self._total.get(path, ()) not in (None, total):
                self._total[path] = total
                if usage := self._usage(payload["info"]["last_token_usage"]):
                    session.add_call(f"{at_s} {total}", usage, session.model)
        elif what == "item_completed" and "started_at_ms" in payload:
            own_ms = payload["completed_at_ms"] - payload["started_at_ms"]
            self._own_s[payload["item"]["id"]] = own_ms / 1000
        elif kind == "response_item" and what == "message" and payload["role"] != "assistant":
            session.add_input(at_s, person=payload["role"] == "user" and not session.parent)
        elif kind == "response_item" and what.endswith("_output"):
            session.end_tool(payload["call_id"], at_s, self._own_s.pop(payload["call_id"], None))
        elif kind == "response_item":
            session.add_output(at_s)
            if "call_id" in payload:
                name = payload.get("name") or what.removesuffix("_call")
                arguments = payload.get("arguments") or payload.get("action")
                session.start_tool(payload["call_id"], name, arguments, at_s)


class PiReader(SessionReader):
    """Sessions of Pi: ``~/.pi/agent/sessions``. A file is a session; ``parentId`` makes a tree."""

    source = "pi"

    def _add(self, entry: Any, path: str) -> None:
        if entry["type"] == "session":
            self._known[path] = self._session(entry["id"]), None
            return
        session, call = self._known.get((path, entry.get("parentId"))) or self._known[path]
        at_s, message = seconds(entry["timestamp"]), entry.get("message") or {}
        role = message.get("role")
        if entry["type"] == "compaction":
            session.context_changed = True
        elif role == "user":
            session.add_input(at_s, person=True)
        elif role == "toolResult":
            session.end_tool(message["toolCallId"], at_s)
        elif role == "assistant" and (usage := self._usage(message.get("usage"))):
            session.add_output(at_s, seconds(message["timestamp"]))
            call = session.add_call(entry["id"], usage, message.get("model"), call)
            for block in message["content"]:
                if block["type"] == "toolCall":
                    session.start_tool(block["id"], block["name"], block["arguments"], at_s)
        self._known[path, entry.get("id")] = session, call


class OpenCodeReader(SessionReader):
    """Sessions of OpenCode: ``opencode.db`` in ``~/.local/share/opencode``. Tools have their own times."""

    source = "opencode"
    patterns = ("opencode*.db",)

    def _entries(self, path: Path) -> Iterator[tuple[Path, str, Any]]:
        query = (
            "SELECT m.id, s.id, s.parent_id, m.data, json_group_array(json_remove(p.data, '$.state.output')) "
            "FROM message m JOIN session s ON s.id = m.session_id LEFT JOIN part p ON p.message_id = m.id "
            "AND json_valid(p.data) AND json_extract(p.data, '$.type') = 'tool' "
            "GROUP BY m.id ORDER BY m.time_created, m.id"
        )
        try:
            with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as database:
                rows = database.execute(query).fetchall()
        except sqlite3.Error as error:
            raise TraceError(f"{path}: {error}; expected OpenCode's database") from None
        for row in rows:
            yield path, f"message {row[0]}", row

    def _add(self, entry: Any, path: str) -> None:
        message_id, session_id, parent_id, data, parts = entry
        message = msgspec.json.decode(data)
        parent = None if parent_id is None else self._session(parent_id)
        session = self._session(session_id, parent, None if parent is None else message.get("agent"))
        start_s = seconds(message["time"]["created"])
        if message["role"] == "user":
            session.add_input(start_s, person=parent is None)
            return
        tokens = message["tokens"]
        output, cache = tokens["output"] + tokens.get("reasoning", 0), tokens["cache"]
        counts = {**tokens, "output": output, "cacheRead": cache["read"], "cacheWrite": cache["write"]}
        if not (usage := self._usage(counts)):
            return
        parts = filter(None, msgspec.json.decode(parts))
        tools = [part for part in parts if "end" in part["state"].get("time", ())]
        starts = [seconds(part["state"]["time"]["start"]) for part in tools]
        ended_s = min([seconds(message["time"].get("completed", start_s)), *starts])
        session.add_output(max(start_s, ended_s), start_s)
        session.add_call(message_id, usage, message.get("modelID"))
        session.context_changed = bool(message.get("summary"))  # the next prompt begins with the summary
        for part, tool_s in zip(tools, starts, strict=True):
            state = part["state"]
            session.start_tool(part["callID"], part["tool"], state.get("input"), tool_s)
            session.end_tool(part["callID"], seconds(state["time"]["end"]))
            if sub := (state.get("metadata") or {}).get("sessionId"):
                self._session(sub, session).asked_s = tool_s


class OpenAiReader(SessionReader):
    """Logs of requests to an OpenAI API: a line has ``messages``, ``usage``, ``start_time`` and ``end_time``.
    Without ``session_id``, a request continues the one with the most messages that its own begin with; of
    parallel runs, the one that has waited longest. A first request that is repeated begins another run."""

    source = "openai"

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[bytes, list[tuple[_Session, RecordedCall]]] = {}
        """Digest of messages → the requests that had exactly these."""

    def _add(self, entry: Any, path: str) -> None:
        messages, named = entry["messages"], entry.get("session_id") and str(entry["session_id"])
        start_s = seconds(entry["start_time"] if "start_time" in entry else entry["timestamp"])
        if not (usage := self._usage(entry.get("usage"))):
            return
        digest, digests = blake2b(digest_size=16), []
        for message in messages:
            digest.update(msgspec.json.encode(message))
            digests.append(digest.digest())
        ends = [
            [end for end in self._ends.get(one, ()) if named in (None, end[0].program_id)] for one in digests
        ]
        length = next((n for n in range(len(ends) - 1, 0, -1) if ends[n - 1]), 0)
        continued = ends[length - 1] if length else []
        waiting = [end for end in continued if end[1] is end[0].calls[-1]]
        retried = [end for end in ends[-1] if end[1] is not end[0].calls[0]]
        if waiting:
            session, base = min(waiting, key=lambda end: end[1].end_s)
        elif retried:
            (session, base), length = retried[-1], len(messages)
        elif continued and not ends[-1]:
            session, base = continued[-1]
        else:
            session = self._session(named or f"{Path(path).name}/{len(self._sessions)}")
            base, length = None, len(messages)
        for message in messages[length:]:
            for tool in message.get("tool_calls") or ():
                function = tool["function"]
                if base is session.calls[-1]:
                    session.start_tool(tool["id"], function["name"], function.get("arguments"), base.end_s)
                    session.end_tool(tool["id"], start_s)
        session.add_input(start_s, any(message.get("role") == "user" for message in messages[length:]))
        session.add_output(max(start_s, seconds(entry.get("end_time", start_s))), start_s)
        call = session.add_call(f"{path} {start_s} {len(messages)}", usage, entry.get("model"), base)
        self._ends.setdefault(digests[-1], []).append((session, call))


SESSION_READERS = (ClaudeCodeReader, CodexReader, OpenCodeReader, PiReader, OpenAiReader)
