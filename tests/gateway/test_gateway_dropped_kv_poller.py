"""Programs whose KV the engines have dropped, as a gateway asks for them."""

from __future__ import annotations

from typing import Any

from sojourn_server.gateway.http.dropped_kv_poller import DroppedKVPoller
from sojourn_server.gateway.http.multi_engine_queries import EngineReplies
from sojourn_server.gateway.http.program_id_mapper import ProgramIdMapper
from sojourn_server.gateway.http.replica_addresses import ReplicaAddress, ReplicaAddresses, rank_addresses
from sojourn_server.routing.routing_events import KvDropped


async def test_the_census_covers_all_ranks_and_all_programs() -> None:
    """Of an engine with two ranks and one without, over several pages: a program is dropped only where it
    is at home."""
    replicas, told = ReplicaAddresses(), []
    for url, ranks in (("http://a:1", 2), ("http://b:1", 1), ("http://stock:1", 1)):
        for address in rank_addresses(url, ranks):
            replicas.add(address)
    homes = {"p0": "a:1/0", "p1": "a:1/1", "moved": "b:1", "late": "b:1", "last": "a:1/1"}
    pages = {
        ("http://a:1", 0): {"engines": [["p0", "moved"], ["p1", "p0"]], "next": 2},
        ("http://a:1", 2): {"engines": [[], ["last", "nobody"]], "next": None},
        ("http://b:1", 0): {"engines": [["p1"]], "next": 2},
        ("http://b:1", 2): {"engines": [["late"], ["a rank that it never had"]]},
    }

    class Queries:
        async def ask(self, path: str, authorization: str | None, *, only: Any) -> EngineReplies:
            skip = int(path.rpartition("=")[2])
            urls = [one.url for one in replicas.engines() if only(one)]
            return EngineReplies({url: pages[url, skip] for url in urls if (url, skip) in pages}, [], [])

    class Backend:
        def home(self, tenant: str, program_id: str) -> str | None:
            return homes.get(program_id)

        def tell(self, event: Any) -> None:
            told.append(event)

    def speaks(address: ReplicaAddress) -> bool:
        return address.url != "http://stock:1"

    names = ProgramIdMapper(["default"])
    tracker = DroppedKVPoller(Backend(), replicas, names, Queries(), speaks)  # type: ignore[arg-type]
    await tracker.poll_all()
    tenant = names.key("p0")[0]  # type: ignore[index]
    dropped = {"p0": "a:1/0", "p1": "a:1/1", "late": "b:1", "last": "a:1/1"}
    assert len(told) == 4
    assert all(KvDropped(program, tenant, at) in told for program, at in dropped.items())
