"""The errors of the SDK, raised only if the user sets it up wrongly.

    SojournError
    ├── ConfigError      init(), an environment variable
    └── ArgumentError    program(), wrap(), instrument()

Nothing raises into a running agent: an error of the SDK, the network or the server is counted in
``sojourn.stats()``.
"""

from __future__ import annotations


class SojournError(Exception):
    """Base of all errors of this package."""


class ConfigError(SojournError, ValueError):
    """An argument of ``init()`` or an environment variable has a value that cannot work."""


class ArgumentError(SojournError, ValueError):
    """An invalid argument, such as a program's id or limit, or an object that cannot be wrapped."""
