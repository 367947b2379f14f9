"""What an engine of a pair answers over HTTP's call, with vLLM's own scheduler and with ours."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_server.api.engine_rpc import StockEngineError
from sojourn_server.vllm import kv_transfer_connector
from sojourn_server.vllm.endpoint import VllmEngine
from sojourn_server.vllm.engine_description import is_one_of_a_pair
from sojourn_server.vllm.kv_transfer_connector import reachable_address, worker_status
from sojourn_server.vllm.plugin import _sojourn_call

LINK = {"queued_bytes": 64, "queued_s": 0.5, "moved_bytes": 1000}
TOLD: dict[str, Any] = {
    "slots": 10,
    "slots_used": 3,
    "links": dict.fromkeys(("storage read", "storage write", "compute network"), LINK),
    "counts": {"pushes_complete": 2, "pushes": 3},
    "received_bytes": 5,
    "addresses": ["tcp:10.0.0.7:8500"],
    "epoch": "e1",
    "kv": "5eed",
    "block_s": 0.25,
}


class Executor:
    """Asks a worker that is a script."""

    def __init__(self) -> None:
        self.told: dict[str, Any] | list[dict[str, Any]] | Exception | None = TOLD
        self.asked = 0

    def collective_rpc(self, method: Any, args: tuple[int, ...]) -> list[Any]:
        assert method is worker_status
        assert args == (os.getpid(),)
        self.asked += 1
        if isinstance(self.told, Exception):
            raise self.told
        return self.told if isinstance(self.told, list) else [self.told]


class Core:
    """The part of vLLM's engine core that the plugin sees."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.model_executor = Executor()

    def ask(self, operation: str) -> Any:
        return json.loads(_sojourn_call(self, operation, "{}"))


@pytest.fixture
def make_core(make_paths_engine: Any) -> Callable[..., Core]:
    """A core whose scheduler is vLLM's (``None``) or ours with a policy, and has the paths connector."""

    def make(policy: str | None, **extra: Any) -> Core:
        said = {"listen": "tcp:127.0.0.1:0", "role": "decode", "node": "n7", **extra}
        return Core(make_paths_engine(policy, said, blocks=65, max_model_len=1024).scheduler)

    return make


@pytest.mark.parametrize("policy", [None, "observe"])
def test_a_member_tells_what_a_gateway_needs(make_core: Any, policy: str | None) -> None:
    core = make_core(policy)
    identity = core.scheduler.connector.settings.identity
    core.ask("programs")
    assert core.model_executor.asked == 0, "only what tells of the worker asks it"
    capabilities = core.ask("capabilities")
    assert core.model_executor.asked == 1
    assert capabilities["paths"] == {
        "role": "decode",
        "peer": "tcp:10.0.0.7:8500",
        "node": "n7",
        "epoch": "e1",
        "kv": "5eed",
        "block_s": 0.25,
        "block_bytes": identity.block_bytes,
        "block_tokens": 64,
        "shape": "tensor parallel 1, pipeline parallel 1",
    }
    assert capabilities["tiers"] is None, "the store is everybody's"
    assert capabilities["engine"]["num_blocks"] == "65"
    assert capabilities["policy"] == (policy or "stock")
    assert (capabilities["name"], capabilities["wire"]) == (("sojourn", [1]) if policy else ("vllm", []))
    stats = core.ask("stats")["paths"]
    assert stats["links"]["storage read"] == LINK
    assert (stats["slots"], stats["slots_used"], stats["counts"]) == (10, 3, TOLD["counts"])
    assert stats["requests"] == {}
    core.scheduler.connector.planner.counts["decode"] += 1
    assert core.ask("stats")["paths"]["requests"] == {"decode": 1}
    assert core.scheduler.reset_prefix_cache()
    core.scheduler.connector.has_pending_push_work()  # asked before each step
    assert core.ask("capabilities")["paths"] is None, "after a reset it is a member of no pair"


@pytest.mark.parametrize("policy", [None, "observe"])
def test_metrics_are_drained_by_what_they_have_grown(make_core: Any, policy: str | None) -> None:
    core = make_core(policy)
    drained = core.ask("drain_metrics")
    assert [{"link": "storage", "direction": "read"}, 1000] in drained["counters"]["sojourn_link_bytes_total"]
    assert drained["counters"]["sojourn_path_outcomes_total"] == [[{"what": "pushes_complete"}, 2]]
    assert [{"state": "free"}, 7] in drained["gauges"]["sojourn_path_slots"]
    again = core.ask("drain_metrics")
    assert "sojourn_link_bytes_total" not in again["counters"]
    assert again["gauges"]["sojourn_path_slots"] == drained["gauges"]["sojourn_path_slots"]


@pytest.mark.parametrize("policy", [None, "observe"])
def test_a_worker_that_does_not_answer_keeps_nobody_from_asking(make_core: Any, policy: str | None) -> None:
    core = make_core(policy)
    core.model_executor.told = RuntimeError("Executor failed.")
    assert core.ask("capabilities")["paths"] is None
    assert core.ask("stats")["paths"] is None
    assert "sojourn_path_slots" not in core.ask("drain_metrics")["gauges"]
    core.model_executor.told = TOLD
    assert core.ask("stats")["paths"]["slots_used"] == 3
    core.model_executor.told = RuntimeError("Executor failed.")
    assert core.ask("stats")["paths"]["slots_used"] == 3, "what it said last"
    core.model_executor.told = None
    assert core.ask("capabilities")["paths"] is None, "its traffic is over"


def test_a_worker_in_another_process_is_woken_once(make_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core("observe")
    now = dict(TOLD)
    with monkeypatch.context() as patch:
        patch.setattr(kv_transfer_connector, "fetch_stats", lambda address: now)
        core.model_executor.told = {**TOLD, "stats_address": "/nobody/stats"}
        stats = core.ask("stats")["paths"]
        assert (stats["slots_used"], "stats_address" in stats) == (3, False)
        now["slots_used"] = 4
        assert core.ask("stats")["paths"]["slots_used"] == 4
        assert core.ask("capabilities")["paths"]["epoch"] == "e1"
        assert core.model_executor.asked == 1
    core.model_executor.told = TOLD
    assert core.ask("stats")["paths"]["slots_used"] == 3, "asked in vLLM's way again"
    assert core.model_executor.asked == 2


def test_an_engine_of_several_workers_tells_of_all(make_core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core("observe")
    told = [
        {**TOLD, "addresses": [f"tcp:10.0.0.7:850{at}"], "epoch": f"e{at}", "slots_used": 5 + at}
        for at in range(2)
    ]
    monkeypatch.setattr(kv_transfer_connector, "fetch_stats", lambda address: told[int(address)])
    core.model_executor.told = [{**status, "stats_address": str(at)} for at, status in enumerate(told)]
    paths = core.ask("capabilities")["paths"]
    assert (paths["peer"], paths["epoch"]) == ("tcp:10.0.0.7:8500,tcp:10.0.0.7:8501", "e0,e1")
    assert core.ask("stats")["paths"]["slots_used"] == 6
    assert core.ask("capabilities")["paths"]["peer"] == paths["peer"]
    assert core.model_executor.asked == 1


def test_engines_of_no_pair_say_so(make_core: Any, make_engine: Any) -> None:
    core = Core(make_engine("observe").scheduler)
    assert core.ask("capabilities")["paths"] is None
    assert core.ask("stats")["paths"] is None
    assert core.model_executor.asked == 0
    assert Core(make_engine(None).scheduler).ask("capabilities") == {"error": "stock"}
    without_a_role = make_core("observe", role=None, node=None)
    assert without_a_role.ask("capabilities")["paths"] is None
    assert without_a_role.ask("stats")["paths"]["slots"] == 10


async def test_a_stock_member_is_asked_again_though_it_knows_no_programs(make_core: Any) -> None:
    core = make_core(None)

    class Client:
        engine_core: Any

        async def call_utility_all_async(self, method: str, *arguments: str) -> list[str]:
            return [_sojourn_call(core, *arguments)]

    client = Client()
    client.engine_core = client
    engine = VllmEngine()
    engine.connect(client)  # type: ignore[arg-type]
    with pytest.raises(StockEngineError):
        await engine.call("programs", "{}")
    (answer,) = await engine.call("capabilities", "{}")
    assert json.loads(answer)["paths"]["role"] == "decode"


@pytest.mark.parametrize(
    ("address", "host", "expected"),
    [
        ("tcp:10.0.0.7:8500", "10.9.9.9", "tcp:10.0.0.7:8500"),
        ("tcp:127.0.0.1:8500", "10.9.9.9", "tcp:127.0.0.1:8500"),
        ("tcp:0.0.0.0:8500", "10.9.9.9", "tcp:10.9.9.9:8500"),
        ("tcp:[::]:8500", "fd00::7", "tcp:[fd00::7]:8500"),
        ("tcp:[::1]:8500", "fd00::7", "tcp:[::1]:8500"),
        ("unix:/run/0.0.0.0:1", "10.9.9.9", "unix:/run/0.0.0.0:1"),
        ("tcp:0.0.0.0:8500", "0.0.0.0", f"tcp:{socket.gethostname()}:8500"),  # without a network
    ],
)
def test_nobody_is_told_to_dial_a_wildcard(
    monkeypatch: pytest.MonkeyPatch, address: str, host: str, expected: str
) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", host)
    assert reachable_address(address) == expected


@pytest.mark.parametrize(
    ("name", "role", "extra", "in_pair"),
    [
        ("OffloadingConnector", "kv_both", {}, False),
        ("OffloadingConnector", "kv_consumer", {}, True),
        ("NixlConnector", "kv_both", {}, True),
        ("MultiConnector", "kv_both", {"connectors": [{"kv_connector": "OffloadingConnector"}]}, False),
        ("MultiConnector", "kv_both", {"connectors": [{"kv_connector": "NixlConnector"}]}, True),
        ("MultiConnector", "kv_both", {"connectors": [{"kv_role": "kv_producer"}]}, True),
        ("MultiConnector", "kv_both", {"connectors": [{"kv_connector": "PathsConnector"}]}, True),
    ],
)
def test_which_engines_of_other_connectors_are_in_a_pair(
    name: str, role: str, extra: dict[str, Any], in_pair: bool
) -> None:
    transfer = SimpleNamespace(kv_connector=name, kv_role=role, kv_connector_extra_config=extra)
    scheduler: Any = SimpleNamespace(
        connector=object(), vllm_config=SimpleNamespace(kv_transfer_config=transfer)
    )
    assert is_one_of_a_pair(scheduler) is in_pair
    scheduler.connector = None
    assert not is_one_of_a_pair(scheduler)
