"""The error for an unusable option."""

from __future__ import annotations

from sojourn.errors import InputError


class InvalidOption(InputError):
    """An option cannot be used. The error's text says what was expected. ``next_step`` says what to do; it is
    empty if the text already says so."""

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step
