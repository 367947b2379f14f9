"""The ``sojourn`` command, with one file per sub-command. ``main`` imports only the one that runs.

``sojourn --help`` imports them all. So what needs an extra or takes a second (vLLM, Ray, the gateway's
server) is imported inside functions.

Without the extra ``server`` only ``sojourn run`` works. Start reading at ``build_app``.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

OLDEST_PYTHON = (3, 10)
COMMANDS = (
    "serve", "gateway", "demo", "replay", "simulate", "parity", "profile", "trace", "doctor", "run", "hook",
    "top", "explain", "policy",
)  # fmt: skip
COMMAND_LINE_PACKAGES = ("httpx", "rich", "typer")
LIGHT_COMMANDS = ("top", "explain", "doctor", "policy")
"""Commands for which the extra ``top`` is enough."""
EXTRAS = {
    **dict.fromkeys(COMMAND_LINE_PACKAGES, "server"),
    **dict.fromkeys(("aiohttp", "httptools", "prometheus_client", "starlette", "uvicorn"), "gateway"),
    "tomli": "server",
    "ray": "ray",
    "matplotlib": "demo",
    "textual": "top",
    "openai": "openai",
    "opentelemetry": "otel",
    "vllm": "vllm",
}
"""Package → the extra of sojourn that installs it."""


def build_app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Return the Typer application with the sub-commands ``names``."""
    import typer

    from .console import Commands

    app = typer.Typer(
        name="sojourn",
        cls=Commands,
        help="Keep an agent's KV cache across its tool calls, on an unforked vLLM.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ) -> None: ...

    for name in names:
        module = import_module(f"{__name__}.{name}")
        command = getattr(module, name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
            continue
        settings = getattr(module, "CONTEXT_SETTINGS", None)
        text = cleandoc(getattr(module, "HELP", command.__doc__))
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)  # typer would keep the line breaks of a paragraph
        app.command(name, context_settings=settings, help=text)(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from sojourn import __version__

        print(f"sojourn {__version__}")
        sys.exit(0)


def _replace_unencodable_characters() -> None:
    """Make stdout and stderr print ``?`` for characters that they cannot encode, instead of raising. Streams
    in UTF-8 stay unchanged."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


@contextmanager
def _exit_without_traceback() -> Iterator[None]:
    """Exit if stdout cannot be written or Ctrl-C interrupts. A reader that left, such as ``head``, is told
    nothing."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, as Python would fail at its end with a traceback
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), 1)  # takes what is left in the buffer
        what = error.filename or "the output"
        full = f"sojourn: cannot write {what}: {error.strerror}; make room or name another place"
        sys.exit(1 if error.errno == errno.EPIPE else full)


@contextmanager
def _name_foreign_modules() -> Iterator[None]:
    """Exit with the name of a foreign file that is imported in place of a package, after an error because of
    it."""
    try:
        yield
    except (ImportError, AttributeError):
        for name in ("sojourn", *COMMAND_LINE_PACKAGES):
            found = find_spec(name)
            # All of them are typed packages.
            if found and found.origin and not Path(found.origin).with_name("py.typed").exists():
                sys.exit(f"sojourn: {found.origin} hides the package {name}; rename it, or see PYTHONPATH")
        raise


@_exit_without_traceback()
def main() -> None:
    """Run the ``sojourn`` command. If a package is missing, print which extra installs it, and exit with code
    1."""
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"sojourn: this is Python {sys.version.split()[0]}; expected 3.10 or newer")
    _print_version(sys.argv[1:] == ["--version"])
    _replace_unencodable_characters()
    with _name_foreign_modules():
        _run()


def _run() -> None:
    from sojourn.errors import install_command

    missing = [name for name in COMMAND_LINE_PACKAGES if find_spec(name) is None]
    if missing:
        if sys.argv[1:2] == ["run"]:
            from .agent_process import main as run_agent

            run_agent(sys.argv[2:])
        extra = "top" if sys.argv[1:2] and sys.argv[1] in LIGHT_COMMANDS else "server"
        sys.exit(
            f"sojourn: the command line needs {', '.join(missing)}: {install_command(extra)}; "
            "sojourn run works without them"
        )
    from .console import exit_on_cli_error

    try:
        with exit_on_cli_error():
            named = [name for name in sys.argv[1:2] if name in COMMANDS]
            build_app(named or COMMANDS)(prog_name="sojourn")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or find_spec(package) is not None:
            raise
        sys.exit(f"sojourn: this command needs {package}: {install_command(EXTRAS[package])}")
