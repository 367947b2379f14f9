"""What is wrong with options."""

from __future__ import annotations


class BadOption(ValueError):
    """An option that cannot be used as given; the text says what was expected."""
