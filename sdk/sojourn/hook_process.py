"""The process that a coding agent's hook starts: reports one tool call's start or end to the server.

``sojourn hook`` writes its command: ``python -I -S hook_process.py CLIENT URL``. The hook's JSON is on stdin.
Of it, only ids, the tool's name, the head of a shell command and the duration are sent.

The agent waits for this process. So it uses the standard library only, prints nothing, always exits with 0,
and leaves the sending to a forked child. It waits at most ``MAX_WAIT_S`` for the child to write the event, so
that a tool's end reaches a server nearby before the agent's next request, and after the tool's start.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # ``typing`` takes milliseconds
if TYPE_CHECKING:
    from typing import Any

MAX_WAIT_S = 0.02
CONNECT_TIMEOUT_S = 0.2
ANSWER_TIMEOUT_S = 2.0


def event_of(client: str, hook: dict[str, Any]) -> dict[str, Any] | None:
    """Return the event, in the wire's format, of a hook's input; ``None`` if there is nothing to report."""
    program, agent, kind = hook["session_id"], hook.get("agent_id"), hook["hook_event_name"]
    if client == "qwen-code":  # its requests carry the id that `sojourn run` gave, also those of sub-agents
        program = os.environ.get("SOJOURN_PROGRAM_ID") or program
    elif agent:  # in Codex a sub-agent's id is the thread id of its requests
        program = agent if client == "codex" else f"{program}/{agent}"
    event = {"program_id": program, "seq": 0}
    if kind == "SessionEnd" or (kind == "SubagentStop" and client != "qwen-code"):
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


def _send(url: str, event: dict[str, Any], written: int) -> None:
    """Send the event. Close the pipe ``written`` when it is on its way. Raises ``OSError`` and others."""
    import json
    import re
    import socket

    found = re.match(r"(?:(https?)://)?(?:[^/@]*@)?(\[?([^/\]]+?)\]?(?::(\d+))?)(/.*)?$", url)
    scheme, named, host, port, path = found.groups("") if found else [""] * 5
    place = path.rstrip("/").removesuffix("/v1") + "/sojourn/v1/events"
    # An emitter of this event alone, so that its number is always new.
    batch = {"v": 1, "emitter": f"hook-{os.getpid()}-{os.urandom(6).hex()}", "events": [event]}
    body = json.dumps(batch).encode()
    key = os.environ.get("SOJOURN_API_KEY", "")
    head = (
        f"POST {place} HTTP/1.1\r\nHost: {named}\r\nContent-Type: application/json\r\n"
        + (f"Authorization: Bearer {key}\r\n" if key.isprintable() and key else "")
        + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    address = (host, int(port or (443 if scheme == "https" else 80)))
    connection = socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
    connection.settimeout(ANSWER_TIMEOUT_S)
    if scheme == "https":
        import ssl

        connection = ssl.create_default_context().wrap_socket(connection, server_hostname=host)
    connection.sendall(head.encode() + body)
    os.close(written)
    connection.recv(1)  # a server may drop the request of a client that leaves


def _fork() -> int:
    """Go on in a child without terminal. Return the end of a pipe: this process ends when the child closes
    it, or after ``MAX_WAIT_S``."""
    import select

    waiting, written = os.pipe()
    if os.fork():
        os.close(written)
        select.select([waiting], [], [], MAX_WAIT_S)
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    return written


def main() -> None:
    """Report the hook on stdin. Never raises."""
    try:
        client, url = sys.argv[1], os.environ.get("SOJOURN_URL") or sys.argv[2]
        text = sys.stdin.buffer.read()
        written = _fork() if hasattr(os, "fork") else os.open(os.devnull, os.O_RDWR)
        import json

        event = event_of(client, json.loads(text))
        if event is not None:
            _send(url, event, written)
    except BaseException:
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
