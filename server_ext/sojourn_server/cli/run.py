"""``sojourn run -- COMMAND``: run an agent's own command and report its programs to the server."""

from __future__ import annotations

import typer

from .agent_process import DEFAULT_URL, exec_agent_command, framework_names
from .coding_agents import CLIENTS
from .console import print_note

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
HELP = f"""Run an agent's own command and report its programs and tool calls to a sojourn server.

Example: sojourn run -- mini -m openai/smol -t 'fix the bug'

No code changes. Instrumented on import: {framework_names()}. Only requests to the server itself carry ids. A
bare loop on the openai client is one program for each process, as long as its requests come one after the
other. Python processes of the agent's tools are not instrumented.

Coding agents get settings of their own: {", ".join(CLIENTS)}. One line says what was set."""


def run(
    command: list[str] = typer.Argument(..., metavar="-- COMMAND...", help="The command and its arguments."),
    url: str | None = typer.Option(
        None,
        "--url",
        envvar="SOJOURN_URL",
        help="Root of the sojourn server. Default: OPENAI_BASE_URL (claude: ANTHROPIC_BASE_URL) if a sojourn "
        f"server answers there without a key, else {DEFAULT_URL}.",
    ),
    program: str | None = typer.Option(
        None,
        "--program",
        metavar="ID",
        envvar="SOJOURN_PROGRAM_ID",
        help="Program id of requests outside frameworks and sojourn.program(). Use a new id for each run. "
        "Default: a fresh id for each process.",
    ),
    children: bool = typer.Option(
        False,
        "--children",
        help="Instrument all Python child processes, for a COMMAND that starts agents as processes.",
    ),
) -> None:
    """Replace this process with ``command``. Raises ``CliError`` if there is no such command."""
    exec_agent_command(command, url, children=children, note=print_note, program_id=program)
