"""Which session objects of the OpenAI Agents SDK are one conversation. Stands in for its session classes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sojourn
from sojourn_integrations.openai_agents.conversation_keys import conversation_key
from sojourn_integrations.safe_scope import Scope, leave, set_status


def same(one: Any, two: Any) -> bool:
    return conversation_key(one).key == conversation_key(two).key


def framework_class(name: str) -> type:
    return type(
        name, (SimpleNamespace,), {"__module__": "agents.extensions.memory", "__hash__": object.__hash__}
    )


class Slots:
    """A user's session class that has no attributes to read and takes no weak reference."""

    __slots__ = ("session_id",)

    def __init__(self, session_id: str, **_: object) -> None:
        self.session_id = session_id


@pytest.mark.parametrize("kind", [framework_class("RedisSession"), SimpleNamespace, Slots])
def test_a_session_whose_store_has_no_name_is_known_by_class_and_id(kind: Callable[..., Any]) -> None:
    """An application may make a session object and a client for each request."""
    sessions = [kind(session_id="1", pool=object()) for _ in range(2)]
    assert same(*sessions)
    assert conversation_key(sessions[0])[1:] == (None, False)


def test_a_wrapper_has_the_store_inside() -> None:
    def wrapped(inner: Any, id: str = "1") -> Any:
        return framework_class("EncryptedSession")(session_id=id, underlying_session=inner)

    def stored(path: str, table: str = "m") -> Any:
        return SimpleNamespace(session_id="1", db_path=path, sessions_table="s", messages_table=table)

    kind = type(wrapped(None))
    assert kind.__module__.startswith("agents.")
    assert same(wrapped(stored("a.db")), wrapped(stored("a.db")))
    assert conversation_key(wrapped(stored("a.db"))).program_id is not None
    assert not same(wrapped(stored("a.db")), wrapped(stored("b.db")))
    assert not same(wrapped(stored("a.db")), wrapped(stored("a.db", "other")))
    assert not same(wrapped(stored("a.db")), wrapped(stored("a.db"), "2"))
    assert conversation_key(wrapped(stored(":memory:"))).by_object
    assert conversation_key(wrapped(SimpleNamespace(session_id=None))).by_object
    endless = SimpleNamespace(session_id="1")
    endless.underlying_session = endless
    assert same(endless, endless)


# -- What leaves a scope: our own faults do not, the user's Ctrl-C does


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
    leave(Scope(Raising(ValueError()), None))
    leave(Scope(Raising(ValueError()), None), ValueError())
    set_status(object(), str, "what cannot take a status")
    assert sojourn.stats()["internal_error"] == before + 3
