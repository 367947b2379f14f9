"""What is wrong with options."""

from __future__ import annotations


class BadOption(ValueError):
    """An option that cannot be used as given; the text says what was expected.

    ``next_step`` is what to do about it, or "" where the text has said it.
    """

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message)
        self.next_step = next_step
