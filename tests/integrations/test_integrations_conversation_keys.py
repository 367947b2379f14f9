"""Which session objects of the OpenAI Agents SDK are one conversation. Stands in for its session classes."""

from __future__ import annotations

import contextlib
import gc
import sqlite3
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_integrations.openai_agents import conversation_keys, stores_by_objects
from sojourn_integrations.openai_agents.conversation_keys import conversation_key


@pytest.fixture(autouse=True)
def no_store_of_another_test() -> None:
    conversation_keys._stores_by_objects._known.clear()


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


def keys_of_requests(*sessions: Callable[[], Any]) -> set[Any]:
    """Return the keys of session objects. Each object is freed before the next one is made."""
    keys = set()
    for make in sessions:
        keys.add(conversation_key(make()).key)
        gc.collect()
    return keys


def redis_client(**given: Any) -> Any:
    return Client(connection_pool=Client(connection_kwargs=given))


def test_sqlalchemy_stores() -> None:
    def server(database: str = "a", **options: Any) -> Any:
        return engine(Url(f"postgresql://h/{database}", "h", database), **options)

    first = sql_session(server())
    assert same(first, sql_session(server())), "an engine for each request"
    assert not conversation_key(first).ends
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
        Url("postgresql://", None, None),
    ],
    ids=str,
)
def test_an_engine_without_an_address_is_a_store(url: Url) -> None:
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
    cluster = Client()
    assert same(session(cluster), session(cluster))
    assert not same(session(cluster), session(Client()))


def test_other_stores_of_the_framework() -> None:
    def mongo(client: Any, database: str = "a") -> Any:
        return MONGO(session_id="1", _client=client, _init_sub_key=(database,))

    assert same(mongo(Client(_seeds={("h", 1)})), mongo(Client(_seeds={("h", 1)})))
    assert not same(mongo(Client(_seeds={("h", 1)})), mongo(Client(_seeds={("h", 2)})))
    assert not same(mongo(Client(_seeds=None)), mongo(Client(_seeds=None)))
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


def test_a_database_in_memory_that_is_gone_leaves_nothing() -> None:
    def in_memory() -> Any:
        return engine(Url("sqlite://", None, None, "sqlite"))

    session = sql_session(in_memory())
    key = conversation_key(session).key
    kept = len(conversation_keys._tokens._known)
    del session
    gc.collect()
    assert len(conversation_keys._tokens._known) < kept
    assert conversation_key(sql_session(in_memory())).key != key


@pytest.mark.parametrize(
    "session",
    [
        lambda: DAPR(session_id="1", _dapr_client=Client(), _state_store_name="a"),
        lambda: REDIS(session_id="1", _redis=Client(), _key_prefix="a"),
        lambda: MONGO(session_id="1", _client=Client(), _init_sub_key=("a",)),
        lambda: API(session_id="1", _openai_client=Client()),
        lambda: sql_session(engine(Url("postgresql://", None, None))),
        lambda: REDIS(session_id="1", client_of_another_release=Client()),
    ],
)
def test_a_client_for_each_session_of_the_framework(session: Callable[[], Any]) -> None:
    assert len(keys_of_requests(session, session, session)) == 1


class Own:
    """A user's session class."""

    def __init__(self, session_id: str, **fields: Any) -> None:
        self.session_id = session_id
        self.session_settings = SimpleNamespace()
        self._lock = threading.Lock()
        vars(self).update(fields)


def test_a_class_of_the_user_is_known_by_its_attributes() -> None:
    pool = Client()
    assert same(Own("1"), Own("1"))
    assert not same(Own("1"), Own("2"))
    assert same(Own("1", pool=pool, tenant="a"), Own("1", pool=pool, tenant="a"))
    assert not same(Own("1", pool=pool, tenant="a"), Own("1", pool=pool, tenant="b"))
    assert not same(Own("1", pool=pool), Own("1", pool=Client()))


def test_attributes_that_change_leave_a_conversation_as_it_is() -> None:
    session = Own("1", turns=0, items=None)
    before = conversation_key(session).key
    session.turns, session.items = 1, ["x"]
    assert conversation_key(session).key == before
    session.session_id = "2"
    assert conversation_key(session).key != before


class Slots:
    """A user's session class that has no attributes to read and takes no weak reference."""

    __slots__ = ("session_id",)

    def __init__(self) -> None:
        self.session_id = "1"


@pytest.mark.parametrize("make", [Client, list, dict, time.time, lambda: sqlite3.connect(":memory:")])
def test_an_object_for_each_session_does_not_split_a_conversation(make: Callable[[], Any]) -> None:
    with contextlib.ExitStack() as stack:

        def session() -> Any:
            made = make()
            if isinstance(made, sqlite3.Connection):
                stack.callback(made.close)
            return Own("1", made=made)

        assert len(keys_of_requests(session, session, session)) == 1


def test_an_object_without_weak_references_is_shared_by_sessions() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        first, second = (Own("1", connection=connection) for _ in range(2))
        assert same(first, second)
        known_by = conversation_key(first)
        assert not known_by.by_object
        assert not known_by.ends
        assert len(keys_of_requests(*[lambda: Own("1", connection=connection)] * 2)) == 1


def test_objects_that_live_at_the_same_time_are_two_stores() -> None:
    first, second = (Own("1", store=[]) for _ in range(2))
    assert not same(first, second)
    assert conversation_key(first) == conversation_key(first)
    pools = [Client(), Client()]
    requests = [lambda pool=pool: Own("1", pool=pool, cache=[]) for pool in pools * 2]
    assert len(keys_of_requests(*requests)) == 2


def test_a_shared_object_decides_between_stores_that_can_go_on() -> None:
    pools = [Client(), Client()]
    first, second = (Own("1", pool=pool, cache=Client()) for pool in pools)
    assert not same(first, second)
    before = conversation_key(second).key
    del first, second, pools[0]
    gc.collect()
    assert conversation_key(Own("1", pool=pools[0], cache=Client())).key == before


def test_an_attribute_that_a_session_lacks_tells_no_stores_apart() -> None:
    client = Client()
    assert same(Own("1", client=None, ready=False), Own("1", client=client, ready=True))
    assert same(Own("1", client=client, tenant=("a", 1)), Own("1", tenant=("a", 1)))
    assert not same(Own("1", client=client, tenant=("a", 1)), Own("1", tenant=("a", 2)))


def test_a_class_without_readable_attributes_is_known_by_its_id() -> None:
    assert same(Slots(), Slots())
    assert not conversation_key(Slots()).by_object


def test_stores_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_by_objects, "MAX_CACHED_PROGRAMS", 3)
    monkeypatch.setattr(stores_by_objects, "MAX_STORES_OF_A_CONVERSATION", 2)
    known, clients = stores_by_objects.StoresByObjects(), [Client() for _ in range(3)]
    stores = [known.find("1", {"client": stores_by_objects.seen(client, None)}) for client in clients]
    assert len(set(stores)) == 3
    assert known._known == {"1": stores[1:]}
    for id in ("2", "1", "3", "4"):
        known.find(id, {})
    assert list(known._known) == ["1", "3", "4"]


def test_a_fork_leaves_no_lock_behind() -> None:
    known = stores_by_objects.StoresByObjects()
    holder = threading.Thread(target=known._lock.acquire)
    holder.start()
    holder.join()
    known._after_fork()
    assert known._lock.acquire(blocking=False)
    assert known.find("1", {}) is known.find("1", {})


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
    endless = Own("1")
    vars(endless)["underlying_session"] = endless
    assert same(endless, endless)
