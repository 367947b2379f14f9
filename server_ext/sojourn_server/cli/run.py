"""``sojourn run -- COMMAND``: an agent's own command, unchanged, told about the server.

The command replaces this process, so its exit code, signals and terminal are its own. It finds
``SOJOURN_URL`` and, first on ``PYTHONPATH``, a folder whose ``sitecustomize`` attaches to mini
and to openai clients when they are imported. Any Python started below inherits both, but only
the agent itself is attached to, not the Pythons that its tools start, unless ``--children`` is given.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import typer

from .console import CliError, console

DEFAULT_URL = "http://127.0.0.1:8000"
OPENAI_BASE_URL = "OPENAI_BASE_URL"
"""Where agents send their requests; that a sojourn server is there, it does not say."""
NOT_FOUND = 127
"""Exit code of a shell for a command that does not exist."""

AGENT = "SOJOURN_RUN_AGENT"
CHILDREN = "SOJOURN_RUN_CHILDREN"
"""Read by the ``sitecustomize``, which explains them; it runs where this package may be missing."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "run",
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        help=(
            "Run an agent's own command with its programs and tool calls reported to a sojourn server:\n\n"
            "sojourn run -- mini -m openai/smol -t 'fix the bug'\n\n"
            "No code changes: mini-swe-agent 2.x and openai clients are instrumented as they are imported. "
            "Only requests for the server itself carry anything. "
            "Pythons started by the agent's tools are left alone."
        ),
    )(run)


def run(
    command: list[str] = typer.Argument(..., metavar="-- COMMAND...", help="The command and its arguments."),
    url: str | None = typer.Option(
        None,
        "--url",
        envvar="SOJOURN_URL",
        help="Root of the sojourn server; else OPENAI_BASE_URL, where that is one without a key, "
        f"else {DEFAULT_URL}.",
    ),
    children: bool = typer.Option(
        False,
        "--children",
        help="Instrument every Python below, e.g. where COMMAND is a script starting agents.",
    ),
) -> None:
    """Become ``command``. Raises ``CliError`` where there is no such command."""
    program = find_command(command[0])
    if url is None:
        url = named_for_openai(os.environ) or DEFAULT_URL
    _warn_unless_served(url)
    environment = child_environment(os.environ, url, children=children)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(program, command, environment)
    except OSError as error:
        raise CliError(
            f"{command[0]} cannot be run: {error.strerror}",
            "name an executable, e.g. `sojourn run -- python agent.py` for a script",
            exit_code=126,
        ) from error


def find_command(name: str) -> str:
    """The executable ``name`` stands for. Raises ``CliError`` naming the likely remedy."""
    found = shutil.which(name)
    if found:
        return found
    if Path(name).suffix == ".py" and Path(name).is_file():
        remedy = f"run it with Python: sojourn run -- python {name} …"
    elif name in ("mini", "mini-extra", "mini-swe-agent"):
        remedy = "install it into this environment: pip install '.[mini-swe-agent]' in a checkout of sojourn"
    else:
        remedy = "check the spelling and PATH; the command comes after `--`, e.g. sojourn run -- mini -t '…'"
    raise CliError(f"there is no command {name!r}", remedy, exit_code=NOT_FOUND)


def child_environment(environment: Mapping[str, str], url: str, *, children: bool = False) -> dict[str, str]:
    """``environment`` with the server's URL and our folder first on ``PYTHONPATH``."""
    folder = autostart_directory()
    given = environment.get("PYTHONPATH")
    # An empty entry means the current directory, but an empty variable means none.
    entries = [entry for entry in given.split(os.pathsep) if entry != folder] if given else []
    fresh = {name: value for name, value in environment.items() if name not in (AGENT, CHILDREN)}
    if children:
        fresh[CHILDREN] = "1"
    return {**fresh, "SOJOURN_URL": url, "PYTHONPATH": os.pathsep.join([folder, *entries])}


def named_for_openai(environment: Mapping[str, str]) -> str | None:
    """The root of ``OPENAI_BASE_URL`` where a sojourn server answers there, else ``None`` and a note.

    It may name any provider's server. That one is shown no key and, unless it says that it is ours, is told
    of no program; one that wants a key is to be named.
    """
    import httpx
    from sojourn.wire import CAPABILITIES_PATH

    named = environment.get(OPENAI_BASE_URL, "").strip()
    if not named:
        return None
    root = named.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(root + CAPABILITIES_PATH, timeout=1.0, trust_env=False)
        document = answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        problem = type(error).__name__
    except (ValueError, RecursionError):
        problem = "no JSON"
    else:
        if isinstance(document, dict) and document.get("name") == "sojourn":
            return root
        problem = f"HTTP {answer.status_code}"
    if root != DEFAULT_URL:
        console.print(
            f"[yellow]note:[/] {OPENAI_BASE_URL} is not taken: no sojourn server answers there without a key "
            f"({problem}); where there is one, name it with --url",
            highlight=False,
            soft_wrap=True,
        )
    return None


def autostart_directory() -> str:
    """The folder whose ``sitecustomize`` instruments a child. Raises ``CliError`` where it is absent."""
    spec = importlib.util.find_spec("sojourn_integrations")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "autostart"
        if (folder / "sitecustomize.py").is_file():
            return str(folder)
    remedy = "reinstall the package: pip install --force-reinstall sojourn"
    raise CliError("the integrations are not installed", remedy)


def _warn_unless_served(url: str) -> None:
    """One line where no sojourn server answers; the agent runs all the same."""
    import httpx
    from sojourn.wire import CAPABILITIES_PATH

    root = url.rstrip("/").removesuffix("/v1")
    try:
        answer = httpx.get(root + CAPABILITIES_PATH, timeout=1.0, trust_env=False)
    except httpx.InvalidURL as error:
        raise CliError(
            f"{url!r} is no URL: {error}", f"give the server's root, e.g. --url {DEFAULT_URL}"
        ) from error
    except (httpx.HTTPError, httpx.UnsupportedProtocol) as error:
        problem = type(error).__name__
    else:
        # A server with an API key answers 401 here, which shows that it is one.
        if answer.status_code in (200, 401, 403):
            return
        problem = f"HTTP {answer.status_code}"
    console.print(
        f"[yellow]note:[/] no sojourn server answers at {url} ({problem}); the command runs without it",
        highlight=False,
        soft_wrap=True,
    )
