"""``sojourn hook``: settings with which a coding agent reports its tool calls to a sojourn server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer

from .coding_agents import hook_settings, plugin_text
from .console import DEFAULT_URL, CliError, print_line, url_option, write_file

_MARK = "hook_process.py"
"""Part of every command that this module writes, by which it finds them again."""
_BY_HAND = "add what sojourn hook prints by hand"
_STARTED_ANEW = "new sessions report their tools"
_FILES = {
    "claude-code": ("CLAUDE_CONFIG_DIR", ".claude", "settings.json", _STARTED_ANEW),
    "codex": ("CODEX_HOME", ".codex", "hooks.json", "start codex and trust the hooks with /hooks"),
    "opencode": ("OPENCODE_CONFIG_DIR", ".config/opencode", "plugin/sojourn.js", _STARTED_ANEW),
    "qwen-code": ("QWEN_HOME", ".qwen", "settings.json", "start it with sojourn run -- qwen"),
}
"""Client → variable that names the folder of the user's settings, that folder below the user's home without
the variable, file, next step for the user."""


def hook(
    client: str = typer.Argument(..., metavar="|".join(_FILES), help="The coding agent."),
    url: str = url_option("Root of the sojourn server."),
    install: bool = typer.Option(
        False, "--install", help="Add the hooks to the user's settings, and keep what is there."
    ),
    project: bool = typer.Option(
        False, "--project", help="Add them to the settings of the current folder's project instead."
    ),
) -> None:
    """Print the settings with which a coding agent reports its tool calls to a sojourn server.

    Example: sojourn hook claude-code --install

    The agent starts a small process at each start and end of a tool. It sends ids, the tool's name, the name
    of a shell command's program and the duration, and no other text. The agent goes on at once if no server
    answers. SOJOURN_API_KEY gives the server's key.
    """
    if client not in _FILES:
        known = f"name one of {', '.join(_FILES)}; sojourn run reports the tools of Pi"
        raise CliError(f"the hooks of {client!r} are unknown", known)
    variable, folder, name, next_step = _FILES[client]
    if project:  # the command holds paths of this machine: teams commit settings.json, but not the local file
        local = "settings.local.json" if client == "claude-code" else name
        path = Path(folder.replace(".config/", "."), local)
    else:
        path = Path(os.environ.get(variable) or Path.home() / folder, name)
    url = url or DEFAULT_URL
    if client == "opencode":
        text = plugin_text(url)
    else:
        settings = hook_settings(client, url)
        if install or project:
            settings = _merged(path, settings["hooks"])
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    if not (install or project):
        sys.stdout.write(text)
        return
    write_file(path, text, _BY_HAND)
    print_line(f"wrote {path}; {next_step}")


def _merged(path: Path, hooks: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the settings in ``path``, if any, with ``hooks`` in place of those that an earlier call wrote.
    Others stay. Raises ``CliError`` if the file cannot be read or is not understood."""
    try:
        settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
        merged: dict[str, list[Any]] = {}
        for event, groups in settings.get("hooks", {}).items():
            for group in groups:
                others = [one for one in group["hooks"] if _MARK not in one.get("command", "")]
                if others or not group["hooks"]:
                    merged.setdefault(event, []).append({**group, "hooks": others})
        for event, groups in hooks.items():
            merged[event] = [*merged.get(event, []), *groups]
        return {**settings, "hooks": merged}
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise CliError(f"{path} is not understood: {error}", f"mend the file, or {_BY_HAND}") from error
