"""Which session objects of the OpenAI Agents SDK are one conversation. Stands in for its session classes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_integrations.openai_agents.conversation_keys import conversation_key


def same(one: Any, two: Any) -> bool:
    return conversation_key(one).key == conversation_key(two).key


def framework_class(name: str) -> type:
    return type(
        name, (SimpleNamespace,), {"__module__": "agents.extensions.memory", "__hash__": object.__hash__}
    )


class Client:
    """Stands for the client of a database; two clients of one address are equal to nothing."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class Url:
    def __init__(self, text: str, host: str | None, database: str | None, kind: str = "postgresql") -> None:
        self.text, self.host, self.database, self.kind = text, host, database, kind

    def get_backend_name(self) -> str:
        return self.kind

    def render_as_string(self, *, hide_password: bool) -> str:
        assert hide_password
        return self.text

    def __str__(self) -> str:
        return self.text


def engine(url: Url, **options: Any) -> Any:
    return Client(url=url, sync_engine=Client(get_execution_options=lambda: options))


def sql_session(made: Any, id: str = "1", table: str = "messages") -> Any:
    kind = SQL
    tables = {"_sessions": Client(fullname="sessions"), "_messages": Client(fullname=table)}
    return kind(session_id=id, _engine=made, **tables)


SQL, REDIS, MONGO, DAPR, API = map(
    framework_class,
    ("SQLAlchemySession", "RedisSession", "MongoDBSession", "DaprSession", "OpenAIConversationsSession"),
)


def redis_client(**given: Any) -> Any:
    return Client(connection_pool=Client(connection_kwargs=given))


def test_sqlalchemy_stores() -> None:
    def server(database: str = "a", **options: Any) -> Any:
        return engine(Url(f"postgresql://h/{database}", "h", database), **options)

    first = sql_session(server())
    assert same(first, sql_session(server())), "an engine for each request"
    assert not conversation_key(first).by_object
    others = [
        sql_session(server("b")),
        sql_session(server(), id="2"),
        sql_session(server(), table="others"),
        sql_session(server(schema_translate_map={None: "tenant"})),
    ]
    assert not any(same(first, other) for other in others)


@pytest.mark.parametrize(
    "url",
    [
        Url("sqlite://", None, None, "sqlite"),
        Url("sqlite:///:memory:", None, ":memory:", "sqlite"),
        Url("sqlite:///file:x?mode=memory", None, "file:x", "sqlite"),
    ],
    ids=str,
)
def test_an_engine_in_memory_is_a_store(url: Url) -> None:
    first, second = engine(url), engine(url)
    assert same(sql_session(first), sql_session(first))
    assert not same(sql_session(first), sql_session(second))


def test_redis_stores() -> None:
    def session(client: Any, prefix: str = "agents") -> Any:
        return REDIS(session_id="1", _redis=client, _key_prefix=prefix)

    first = session(redis_client(host="h", port=6379))
    assert same(first, session(redis_client(host="h", port=6379)))
    assert not same(first, session(redis_client(host="h", port=6380)))
    assert not same(first, session(redis_client(host="h", port=6379, db=1)))
    assert not same(first, session(redis_client(host="h", port=6379), "tenant"))


def test_other_stores_of_the_framework() -> None:
    def mongo(client: Any, database: str = "a") -> Any:
        return MONGO(session_id="1", _client=client, _init_sub_key=(database,))

    assert same(mongo(Client(_seeds={("h", 1)})), mongo(Client(_seeds={("h", 1)})))
    assert not same(mongo(Client(_seeds={("h", 1)})), mongo(Client(_seeds={("h", 2)})))
    client = Client(_seeds={("h", 1)})
    assert not same(mongo(client), mongo(client, "b"))

    def dapr(name: str) -> Any:
        return DAPR(session_id="1", _dapr_client=client, _state_store_name=name)

    assert same(dapr("a"), dapr("a"))
    assert not same(dapr("a"), dapr("b"))

    def api(url: str) -> Any:
        return API(session_id="conv_1", _openai_client=Client(base_url=url))

    assert same(api("http://a"), api("http://a"))
    assert not same(api("http://a"), api("http://b"))


@pytest.mark.parametrize(
    "session",
    [
        lambda: DAPR(session_id="1", _dapr_client=Client(), _state_store_name="a"),
        lambda: REDIS(session_id="1", client_of_another_release=Client()),
        lambda: SimpleNamespace(session_id="1", pool=Client()),
        lambda: Slots(),
    ],
)
def test_a_session_whose_store_has_no_name_is_known_by_class_and_id(session: Callable[[], Any]) -> None:
    """An application may make a session object and a client for each request."""
    known_by = conversation_key(session())
    assert same(session(), session())
    assert known_by[1:] == (None, False)


class Slots:
    """A user's session class that has no attributes to read and takes no weak reference."""

    __slots__ = ("session_id",)

    def __init__(self) -> None:
        self.session_id = "1"


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
