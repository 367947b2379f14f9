"""The process that a coding agent's hook starts: reports one tool call's start or end to the server.

``sojourn hook`` writes its command: ``python -I -S hook_process.py CLIENT URL``. The hook's JSON is on stdin.
Of it, only ids, the tool's name, the head of a shell command and the duration are sent.

The agent waits for this process. So it uses the standard library only, prints nothing, always exits with 0,
and leaves the rest to a forked child as soon as it has read its input. The child sends within milliseconds,
so a tool's end usually reaches a server nearby before the agent's next request. Without ``os.fork``
(Windows) the process sends itself, in at most 0.4 s.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False  # ``typing`` takes milliseconds
if TYPE_CHECKING:
    from typing import Any

CONNECT_TIMEOUT_S = 0.2
ANSWER_TIMEOUT_S = 2.0 if hasattr(os, "fork") else 0.2


def event_of(client: str, hook: dict[str, Any]) -> dict[str, Any] | None:
    """Return the event, in the wire's format, of a hook's input; ``None`` if there is nothing to report."""
    program, agent, kind = hook["session_id"], hook.get("agent_id"), hook["hook_event_name"]
    if client == "qwen-code":  # its requests carry the id that `sojourn run` gave, also those of sub-agents
        program = os.environ.get("SOJOURN_PROGRAM_ID") or program
    elif agent:  # in Codex a sub-agent's id is the thread id of its requests
        program = agent if client == "codex" else f"{program}/{agent}"
    event = {"program_id": program, "seq": 0}
    if kind == "SessionEnd" or (kind == "SubagentStop" and agent and client != "qwen-code"):
        return {"type": "program_end", **event}
    if kind == "PreToolUse":
        tool = _tool(client, hook["tool_name"], hook.get("tool_input"))
        return {"type": "tool_start", **event, "call_id": hook["tool_use_id"], **tool}
    if kind not in ("PostToolUse", "PostToolUseFailure"):
        return None
    if "duration_ms" in hook:
        event["duration_s"] = hook["duration_ms"] / 1000
    if kind == "PostToolUseFailure":
        event["status"] = "cancelled" if hook.get("is_interrupt") else "error"
    return {"type": "tool_stop", **event, "call_id": hook["tool_use_id"]}


def _tool(client: str, name: str, arguments: object) -> dict[str, str]:
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    # As a top-level module, since the package would load msgspec.
    from shell_command import command_class, command_of, is_shell_tool  # type: ignore[import-not-found]

    # Codex's hooks call the shell Bash, but its model calls it exec_command.
    tool = {"tool": "exec_command" if client == "codex" and name == "Bash" else name}
    line = command_of(arguments) if isinstance(arguments, dict) and is_shell_tool(name) else None
    head = command_class(line) if line else None
    return {**tool, "tool_class": head} if head else tool


def _send(url: str, event: dict[str, Any], started_s: float) -> None:
    """Send the event of a hook that ran at ``started_s`` (monotonic). Raises ``OSError`` and others."""
    import json
    import re
    import socket

    found = re.match(r"(?:(https?)://)?(?:[^/@]*@)?(\[?([^/\]]+?)\]?(?::(\d+))?)(/.*)?$", url)
    scheme, named, host, port, path = found.groups("") if found else [""] * 5
    place = path.rstrip("/").removesuffix("/v1") + "/sojourn/v1/events"
    key = os.environ.get("SOJOURN_API_KEY", "")
    address = (host, int(port or (443 if scheme == "https" else 80)))
    connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
    connection.settimeout(ANSWER_TIMEOUT_S)
    if scheme == "https":
        import ssl

        connection = ssl.create_default_context().wrap_socket(connection, server_hostname=host)
    event["age_s"] = round(time.monotonic() - started_s, 4)
    # An emitter of this event alone, so that its number is always new.
    batch = {"v": 1, "emitter": f"hook-{os.getpid()}-{os.urandom(6).hex()}", "events": [event]}
    body = json.dumps(batch).encode()
    head = (
        f"POST {place} HTTP/1.1\r\nHost: {named}\r\nContent-Type: application/json\r\n"
        + (f"Authorization: Bearer {key}\r\n" if key.isprintable() and key else "")
        + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    connection.recv(1)  # a server may drop the request of a client that leaves


def _go_on_in_a_child() -> None:
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # the agent waits until they are closed
        os.dup2(null, stream)
    os.setsid()


def main() -> None:
    """Report the hook on stdin. Never raises."""
    try:
        started_s = time.monotonic()
        client, url = sys.argv[1], os.environ.get("SOJOURN_URL") or sys.argv[2]
        text = sys.stdin.buffer.read()
        if hasattr(os, "fork"):
            _go_on_in_a_child()
        import json

        event = event_of(client, json.loads(text))
        if event is not None:
            _send(url, event, started_s)
    except BaseException:
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
