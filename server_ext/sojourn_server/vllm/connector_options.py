"""Reads and checks the options in ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..kv_offload.store_folder import is_store_name
from .plugin_settings import SettingsError


class ConnectorOptions:
    """Reads ``kv_connector_extra_config`` option by option. The constructor raises ``SettingsError`` if an
    option is not in ``known``.

    Each method returns the value of one option, or the given ``default`` if the option is missing. It raises
    ``SettingsError`` if the value is wrong, or if the option is missing and the method got no default.
    ``expected``: text for the error that says which values are right."""

    def __init__(self, given: dict[str, Any], known: Collection[str]) -> None:
        self._given = dict(given)
        for name in self._given:
            if name not in known:
                raise SettingsError(f"unknown connector setting {name!r}; expected {', '.join(known)}")

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def is_auto(self, name: str) -> bool:
        """Return whether the option's value is ``auto``."""
        return bool(self._given.get(name) == "auto")

    def text(self, name: str, expected: str) -> str:
        value = self._given.get(name)
        if not isinstance(value, str) or not value:
            raise self._wrong(name, expected)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._given.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def whole(self, name: str, default: int | None = None, *, flag: str = "", unit: str = "") -> int:
        """Return the value of an option that is a whole number, at least 1. For error messages: ``flag`` is
        the option's name in ``sojourn serve``; ``unit`` follows "a whole number", for example " of bytes"."""
        value = self._given.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(name, f"a whole number{unit}, at least 1", flag)
        return value

    def size(self, name: str, at_least: int, what: str, *, flag: str) -> int:
        """Return the value of an option that is a size in bytes, at least ``at_least``. For error messages:
        ``what`` describes this minimum, ``flag`` is the option's name in ``sojourn serve``."""
        value = self.whole(name, flag=flag, unit=" of bytes")
        if value < at_least:
            raise self._wrong(name, f"at least {what}, {at_least}", flag)
        return value

    def number(self, name: str, default: float | None, expected: str) -> float | None:
        value = self._given.get(name, default)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(name, expected)
        return value

    def choice(self, name: str, choices: Sequence[str], default: str | None) -> str | None:
        value = self._given.get(name, default)
        if value is not None and value not in choices:
            raise self._wrong(name, " or ".join(choices))
        return value

    def store_name(self, name: str, expected: str, *, flag: str = "") -> str:
        value = self._given.get(name)
        if not isinstance(value, str) or not is_store_name(value):
            raise self._wrong(name, expected, flag)
        return value

    def _wrong(self, name: str, expected: str, flag: str = "") -> SettingsError:
        named = f"{name} ({flag})" if flag else name
        return SettingsError(f"{named} is {self._given.get(name)!r}; expected {expected}")
