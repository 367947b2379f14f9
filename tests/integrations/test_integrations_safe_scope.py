"""What leaves a scope: our own faults do not, the user's Ctrl-C does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sojourn
from sojourn_integrations.safe_scope import Scope, leave


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __exit__(self, *_: Any) -> None:
        raise self.error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_leaving_gets_out(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        leave(Scope(Raising(kind()), None))


def test_an_internal_error_is_counted() -> None:
    before = sojourn.stats()["internal_error"]
    leave(Scope(Raising(ValueError()), SimpleNamespace()), status="ok")
    leave(Scope(Raising(ValueError()), object()), ValueError())
    assert sojourn.stats()["internal_error"] == before + 2


def test_what_cannot_take_its_status_is_left_all_the_same() -> None:
    before = sojourn.stats()["internal_error"]
    leave(Scope(Raising(ValueError()), None), status="ok")
    assert sojourn.stats()["internal_error"] == before + 2
