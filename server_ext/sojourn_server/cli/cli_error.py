"""``CliError``, which every sub-command raises for a failure that the user can fix."""

from __future__ import annotations

from ..launch.redaction import without_userinfo


class CliError(Exception):
    """A failure that the user can fix: what was wrong (``message``), what to do (``next_step``), and the exit
    code of the command. Names and passwords in URLs are hidden in both texts."""

    def __init__(self, message: str, next_step: str, *, exit_code: int = 2) -> None:
        self.message = without_userinfo(message)
        self.next_step = without_userinfo(next_step)
        super().__init__(self.message)
        self.exit_code = exit_code
