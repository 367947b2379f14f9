"""``CliError``, which every sub-command raises for a failure that the user can fix."""

from __future__ import annotations


class CliError(Exception):
    """A failure that the user can fix: what was wrong (``message``), what to do (``next_step``), and the exit
    code of the command."""

    def __init__(self, message: str, next_step: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.exit_code = exit_code
