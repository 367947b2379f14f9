"""The errors of the SDK. They are raised only if the user sets up the SDK wrongly.

    SojournError
    ├── ConfigError      init(), an environment variable
    └── ArgumentError    program(), Aeg(), wrap(), instrument()

``InputError`` is the base of errors about input from outside, in the server too.

The SDK never raises into a running agent. It counts errors of its own, of the network and of the server
instead; see ``sojourn.stats()``.
"""

from __future__ import annotations

import sys


class SojournError(Exception):
    """Base of all errors of this package."""


class ConfigError(SojournError, ValueError):
    """An argument of ``init()`` or an environment variable has a value that cannot work."""


class ArgumentError(SojournError, ValueError):
    """An invalid argument, such as a program's id or hint, or an object that cannot be wrapped."""


CANCELLED_BY = frozenset(
    {
        "CancelledError", "KeyboardInterrupt", "GeneratorExit",
        "GraphInterrupt",  # LangGraph: the run waits for a person, and repeats the call when it continues
        "ApprovalRequired", "CallDeferred",  # Pydantic AI, for the same
        "HumanFeedbackPending",  # CrewAI, for the same
    }
)  # fmt: skip
"""Names of the exception classes that mean that a run or a tool call was cancelled. These are names, not
classes, so that neither asyncio nor a framework need be imported."""
RESULTS = frozenset({"ParentCommand", "InterruptAgentFlow"})
"""Names of the exception classes by which a tool hands over its result: LangGraph's command to an outer graph
(a handoff), and the end of a run of mini-swe-agent."""


def status_of(error: BaseException | None) -> str:
    """Return ``ok``, ``cancelled`` or ``error`` for a run that ended with the exception ``error``. ``None``,
    a class of ``RESULTS`` and a ``SystemExit`` with status 0 give ``ok``."""
    if error is None:
        return "ok"
    if isinstance(error, SystemExit) and (error.code is None or (type(error.code) is int and not error.code)):
        return "ok"
    names = {kind.__name__ for kind in type(error).__mro__}
    if not names.isdisjoint(RESULTS):
        return "ok"
    return "error" if names.isdisjoint(CANCELLED_BY) else "cancelled"


def tool_status_of(error: BaseException | None) -> str:
    """Return ``timeout``, ``ok``, ``cancelled`` or ``error`` for a tool call that ended with the exception
    ``error``. ``None`` gives ``ok``."""
    # By name, since subprocess.TimeoutExpired is not a TimeoutError, nor was asyncio.TimeoutError before
    # Python 3.11.
    if any(kind.__name__ in ("TimeoutError", "TimeoutExpired") for kind in type(error).__mro__):
        return "timeout"
    return status_of(error)


def install_command(extras: str) -> str:
    """Return the command that installs ``extras`` (names separated by commas), for error messages. The
    command names a checkout, since no package index has sojourn. On Linux it names PyTorch's index for the
    CPU engine, whose build of PyTorch PyPI does not have."""
    needs_index = sys.platform == "linux" and "cpu" in extras.split(",")
    index = " --extra-index-url https://download.pytorch.org/whl/cpu" if needs_index else ""
    return f"pip install '.[{extras}]'{index} in a checkout of sojourn"


MAX_ERROR_CHARS = 1000
"""Longest text of an ``InputError``."""
_CUT = " … "


class InputError(ValueError):
    """Bytes or settings from outside cannot be used.

    The message may quote the input. So the middle of a message longer than ``MAX_ERROR_CHARS`` is cut out.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_ERROR_CHARS:
            end = MAX_ERROR_CHARS // 3
            text = f"{text[: MAX_ERROR_CHARS - end - len(_CUT)]}{_CUT}{text[-end:]}"
        super().__init__(text)
