"""The error for an unusable option."""

from __future__ import annotations

from sojourn.errors import InputError


class InvalidOption(InputError):
    """An unusable option; the text says what was expected.

    ``next_step`` says what to do; empty if the text already says it.
    """

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step
