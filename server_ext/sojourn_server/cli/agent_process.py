"""``sojourn run``: replace this process with an agent's command. Needs only the SDK and the standard library.

The agent keeps its own exit code, signals and terminal. A coding agent of ``coding_agents.CLIENTS`` gets
settings of its own. Otherwise the environment has ``SOJOURN_URL`` and, first on
``PYTHONPATH``, a folder whose ``sitecustomize`` instruments agent frameworks when they are imported. Python
processes that the agent's tools start inherit both variables, but are instrumented only with ``--children``.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from sojourn.config import with_scheme, without_credentials
from sojourn.ids import id_problem
from sojourn.wire_codec import CAPABILITIES_PATH

from .cli_error import CliError
from .coding_agents import CLIENTS, NOT_FOLLOWED, PROVIDER_KEYS, TAKEN_ONCE, Target

OPTIONS = ("--url", "--program", "--children")
"""Options of ``sojourn run``. The first word that is not one of these options begins the command, in typer's
parser and in the parser of ``main``."""
DEFAULT_URL = "http://127.0.0.1:8000"
OPENAI_BASE_URL = "OPENAI_BASE_URL"
"""Environment variable with the URL to which agents send LLM requests. The server there may be any
provider's."""
NOT_FOUND = 127
"""A shell's exit code for a command that does not exist."""
PROBE_TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 64 * 1024

AGENT = "SOJOURN_RUN_AGENT"
CHILDREN = "SOJOURN_RUN_CHILDREN"
"""Environment variable that makes ``sitecustomize`` instrument Python child processes too. That file repeats
the name, because it must not import this package."""

OWN_PROGRAM = "SOJOURN_OWN_PROGRAM"
"""Environment variable that groups into one program all requests that a process sends outside
``program()``."""

REPORTED_URL = "SOJOURN_REPORTED_URL"
"""Environment variable with the URL at which no server answers, so that the SDK does not report it again."""

Note = Callable[[str], None]
"""A function that shows one line to the user."""


def exec_agent_command(
    command: Sequence[str], url: str | None, *, children: bool, note: Note, program_id: str | None = None
) -> NoReturn:
    """Replace this process with ``command``. Raises ``CliError`` if the command cannot be run.

    ``url``: root of the sojourn server; ``None``: the root of ``OPENAI_BASE_URL`` (Claude Code:
    ``ANTHROPIC_BASE_URL``) if a sojourn server answers there, else ``DEFAULT_URL``. ``children``: also
    instrument the command's Python child processes. ``program_id``: id of the program to which all requests
    outside ``program()`` belong.
    """
    _check_is_no_option(command[0])
    problem = None if program_id is None else id_problem(program_id)
    if problem is not None:
        raise CliError(f"--program {problem}", "give an id for this run, e.g. --program issue-1234-try-1")
    program = find_command(command[0])
    name = Path(command[0]).name
    variable = "ANTHROPIC_BASE_URL" if name == "claude" else OPENAI_BASE_URL
    url = with_scheme(url) if url is not None else base_url_root(os.environ, note, variable) or DEFAULT_URL
    environment, is_known = dict(os.environ), name in (*CLIENTS, *NOT_FOLLOWED)
    if not is_known and environment.get(OPENAI_BASE_URL, "").rstrip("/") == (root := _root_of(url)):
        shown = without_credentials(root)
        note(f"{OPENAI_BASE_URL} lacks /v1, so OpenAI's clients get 404; set it to {shown}/v1")
    if (problem := _problem_at(_root_of(url), may_need_key=True)) is not None:
        again = "" if is_known else ", and the SDK tries again when it sends events"
        note(f"no sojourn server answers at {url} ({problem}); the command runs without it{again}")
    if not is_known:
        environment = child_environment(environment, url, children=children, program_id=program_id)
        environment |= {} if problem is None else {REPORTED_URL: url}
    elif problem is None:
        command, environment = configured_client(command, environment, url, note, program_id)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(program, list(command), environment)
    except OSError as error:
        raise CliError(
            f"{command[0]} cannot be run: {error.strerror}",
            "name an executable, e.g. `sojourn run -- python agent.py` for a script",
            exit_code=126,
        ) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CliError(message, "write: sojourn run [OPTIONS] -- COMMAND...; see sojourn run --help")


def main(arguments: Sequence[str]) -> NoReturn:
    """Parse ``arguments`` and run ``sojourn run``. The entry point if the ``server`` extra is not
    installed."""
    parser = _Parser(
        prog="sojourn run",
        allow_abbrev=False,
        description="Run an agent's own command with its programs reported to a server. "
        f"Instrumented on import: {framework_names()}.",
    )
    parser.add_argument("--url", default=os.environ.get("SOJOURN_URL"), help="root of the sojourn server")
    parser.add_argument(
        "--children", action="store_true", help="instrument every Python below, not only the agent"
    )
    parser.add_argument(
        "--program", metavar="ID", help="program id of requests outside frameworks and sojourn.program()"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND...")
    try:
        options, unknown = parser.parse_known_args(arguments)
        command = options.command[1:] if options.command[:1] == ["--"] else options.command
        for option in unknown:
            _check_is_no_option(option)
        if not command:
            parser.error("COMMAND is missing")
        exec_agent_command(
            command,
            options.url,
            children=options.children,
            note=lambda text: print(f"note: {text}", file=sys.stderr),
            program_id=options.program,
        )
    except CliError as error:
        print(f"error: {error.message}\nnext: {error.next_step}", file=sys.stderr)
        sys.exit(error.exit_code)


def _check_is_no_option(word: str) -> None:
    """Raise ``CliError`` if ``word``, the first word of the command, looks like an option and is not the name
    of an executable."""
    if not word.startswith("-") or shutil.which(word):
        return
    raise CliError(
        f"unknown option {word.partition('=')[0]}",
        f"sojourn run has {', '.join(OPTIONS)}; the command and its own options come after `--`, "
        "e.g. sojourn run -- mini -t '…'",
    )


def framework_names() -> str:
    """Return the names of the frameworks that are instrumented, separated by commas."""
    from sojourn.instrumentation import FRAMEWORKS

    return ", ".join(name.replace("_", "-") for name in sorted(FRAMEWORKS))


def find_command(name: str) -> str:
    """Return the path of the executable ``name``. Raises ``CliError`` with a remedy if there is no such
    executable."""
    if found := shutil.which(name):
        return found
    remedy = "check the spelling and PATH, or install it; the command comes after `--`"
    if name.endswith(".py") and Path(name).is_file():
        remedy = f"run it with Python: sojourn run -- python {name} …"
    raise CliError(f"there is no command {name!r}", remedy, exit_code=NOT_FOUND)


def child_environment(
    environment: Mapping[str, str], url: str, *, children: bool = False, program_id: str | None = None
) -> dict[str, str]:
    """Return ``environment`` with ``SOJOURN_URL`` added and the ``autostart`` folder first on ``PYTHONPATH``.

    ``children``: also instrument the agent's Python child processes. ``program_id``: the program of all
    requests outside ``program()``. If ``program_id`` is ``None``, an id in ``environment`` is kept; without
    such an id, each process makes a fresh one.
    """
    folder = autostart_directory()
    given = environment.get("PYTHONPATH")
    # An empty entry means the current directory, but an empty variable means no entries.
    entries = [entry for entry in given.split(os.pathsep) if entry != folder] if given else []
    ours = {"SOJOURN_URL": url, "PYTHONPATH": os.pathsep.join([folder, *entries])}
    ours |= {CHILDREN: "1"} if children else {}
    ours |= {} if program_id is None else {"SOJOURN_PROGRAM_ID": program_id}
    kept = {name: value for name, value in environment.items() if name not in (AGENT, CHILDREN, REPORTED_URL)}
    return {OWN_PROGRAM: "1", **kept, **ours}  # a value of OWN_PROGRAM that the user has set takes precedence


def configured_client(
    command: Sequence[str], environment: dict[str, str], url: str, note: Note, program_id: str | None
) -> tuple[Sequence[str], dict[str, str]]:
    """Return the command and the environment of a coding agent, with what directs it to the server at
    ``url``. Tells with ``note`` what was done.

    The user's keys and models are for the provider, so the server's take their place. If the user's own
    base URL names the server, the user's key is for the server, and stays."""
    name, root = Path(command[0]).name, _root_of(url)
    shown = without_credentials(root)
    if name in NOT_FOLLOWED:
        note(f"{name} cannot be followed, since {NOT_FOLLOWED[name]}; it runs unchanged")
        return command, environment
    key = environment.get("SOJOURN_API_KEY", "")
    program_id = program_id or environment.get("SOJOURN_PROGRAM_ID", "")
    target = Target(root, key, program_id, served_models(root, key), environment)
    settings = CLIENTS[name](target)

    theirs = environment.get(settings.base_url)
    if theirs and _root_of(theirs) != root:
        note(f"{name} runs unchanged, since {settings.base_url} is set; unset it to use {shown}")
        return command, environment
    kept = PROVIDER_KEYS.intersection(environment) if theirs else ()
    ours = {**settings.environment, "SOJOURN_URL": root}
    variables = {**environment, **{name: value for name, value in ours.items() if name not in kept}}

    said, words = settings.said, settings.arguments
    for option in TAKEN_ONCE.intersection(word.partition("=")[0] for word in command):
        said, words = f"{said}, but for {option}, which stays yours", ()
    if program_id and "SOJOURN_PROGRAM_ID" not in ours:
        said += "; --program is not used"
    said += f"; server {shown}"
    if not target.models:
        said += "; it lists no models (SOJOURN_API_KEY gives its key)"
    note(said)
    set_variables = {name: value for name, value in variables.items() if value or name not in ours}
    return [command[0], *words, *command[1:]], set_variables


def served_models(root: str, api_key: str) -> list[dict[str, Any]]:
    """Return the models that the server lists; empty if it does not answer with a list."""
    try:
        _, body = get_page(root, "/v1/models", api_key)
        return [model for model in json.loads(body)["data"] if isinstance(model["id"], str)]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError):
        return []


def base_url_root(environment: Mapping[str, str], note: Note, variable: str = OPENAI_BASE_URL) -> str | None:
    """Return the root of the URL in ``variable`` if a sojourn server answers there. Otherwise return ``None``
    and show the reason with ``note``. No reason is shown if the variable is unset or names ``DEFAULT_URL``.

    The variable may name any provider's server, so the probe sends no API key. Only a server that answers as
    a sojourn server gets information about programs. A sojourn server that requires a key is not recognised;
    the user names it with ``--url``.
    """
    named = environment.get(variable, "").strip()
    if not named:
        return None
    root = _root_of(named)
    if (problem := _problem_at(root)) is None:
        return root
    if root != DEFAULT_URL:
        note(
            f"{variable} is not used: no sojourn server answers there without a key ({problem}); "
            "if the server needs a key, name it with --url"
        )
    return None


def _problem_at(root: str, *, may_need_key: bool = False) -> str | None:
    """Return why no sojourn server answers at ``root``; ``None`` if one does. With ``may_need_key``, any
    server counts that asks for a key, and an invalid URL raises ``CliError``."""
    try:
        status, body = get_page(root)
        if may_need_key and status in (200, 401, 403):
            return None
        document = json.loads(body) if status == 200 else None
    except OSError as error:  # also a refused certificate, which is a ValueError too
        return type(error).__name__
    except (ValueError, RecursionError, http.client.InvalidURL) as error:
        if may_need_key:
            raise CliError(
                f"{root!r} is no URL: {error}", f"give the server's root, e.g. --url {DEFAULT_URL}"
            ) from error
        return "no JSON, or no URL"
    except http.client.HTTPException as error:
        return type(error).__name__
    ours = isinstance(document, dict) and document.get("name") == "sojourn"
    return None if ours else f"HTTP {status}"


def _root_of(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def autostart_directory() -> str:
    """Return the folder with the ``sitecustomize`` that instruments the agent. Raises ``CliError`` if the
    folder is missing."""
    spec = importlib.util.find_spec("sojourn_integrations")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (found := Path(place, "autostart", "sitecustomize.py")).is_file():
            return str(found.parent)
    remedy = "reinstall the package: pip install --force-reinstall . in a checkout of sojourn"
    raise CliError("the integrations are not installed", remedy)


def get_page(root: str, path: str = CAPABILITIES_PATH, api_key: str = "") -> tuple[int, bytes]:
    """Return HTTP status and body of a server's page. The request uses no proxy.

    Raises ``OSError`` or ``http.client.HTTPException``; ``ValueError`` or ``http.client.InvalidURL`` for a
    text that is no URL.
    """
    from sojourn.http_transport import tls_context

    parts = urlsplit(root)
    host, port = parts.hostname, parts.port
    if parts.scheme not in ("http", "https") or not host:
        raise http.client.UnknownProtocol(parts.scheme)
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, port, timeout=PROBE_TIMEOUT_S, context=tls_context())
    with closing(connection):
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connection.request("GET", parts.path + path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(MAX_ANSWER_BYTES)
