"""Load and programs with KV, as a gateway asks engines for them."""

from __future__ import annotations

from typing import Any

from sojourn_server.gateway.http.dropped_kv_poller import DroppedKVPoller
from sojourn_server.gateway.http.engine_descriptions import EngineDescription
from sojourn_server.gateway.http.multi_engine_queries import EngineReplies
from sojourn_server.gateway.http.program_id_mapper import ProgramIdMapper
from sojourn_server.gateway.http.replica_addresses import ReplicaAddresses, rank_addresses
from sojourn_server.routing.routing_events import KvReported, ResidentKv


async def test_each_rank_is_reported_and_engines_without_the_route_are_not() -> None:
    replicas, told = ReplicaAddresses(), []
    for url, ranks in (("http://a:1", 2), ("http://b:1", 1), ("http://stock:1", 1)):
        for address in rank_addresses(url, ranks):
            replicas.add(address)
    program = {"program_id": "p", "tokens": 8, "context_tokens": 9}
    documents: dict[str, Any] = {
        "http://a:1": {
            "engines": [{"programs": [program], "requests": 2}, {"waiting": ["q"], "complete": False}]
        },
        "http://b:1": {"engines": "nonsense"},
    }

    class Queries:
        async def ask(self, path: str, authorization: str | None, *, only: Any) -> EngineReplies:
            assert all(only(one) == (one.url != "http://stock:1") for one in replicas.engines())
            return EngineReplies(documents)

    class Backend:
        def tell(self, event: Any) -> None:
            told.append(event)

    def described(replica_id: str) -> EngineDescription:
        return EngineDescription(1, "7", 1000, 0, 4, 0, False, not replica_id.startswith("stock"))

    names = ProgramIdMapper(["default"])
    poller = DroppedKVPoller(Backend(), replicas, names, Queries(), described)  # type: ignore[arg-type]
    await poller.poll_all()
    first, second = told
    assert isinstance(first, KvReported)
    assert (first.replica_id, first.instance, first.requests) == ("a:1/0", "7", 2)
    assert first.programs == (ResidentKv("default", "p", 8, 9),)
    assert (second.replica_id, second.waiting, second.complete) == ("a:1/1", (("default", "q"),), False)
