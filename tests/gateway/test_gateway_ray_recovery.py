"""Without Ray: what outlasts a slow answer, a coordinator that is away, a clock that is set back."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.gateway.http.engine_descriptions import EngineDescription
from sojourn_server.gateway.http.engine_probe import MAX_PARTIAL_DESCRIPTIONS, EngineProbe
from sojourn_server.gateway.ray import coordinator_checkpoint
from sojourn_server.gateway.ray.coordinator import Coordinator
from sojourn_server.gateway.ray.coordinator_checkpoint import (
    CoordinatorCheckpoint,
    CoordinatorOptions,
    read_checkpoint,
    write_checkpoint,
)
from sojourn_server.gateway.ray.coordinator_messages import (
    EngineRegistration,
    JoinRequest,
    PollRequest,
    ReplicaInfo,
    ReportRequest,
    ResponseStatus,
)
from sojourn_server.gateway.ray.engine_process import EngineProcess
from sojourn_server.gateway.ray.open_requests import OpenRequest, OpenRequests
from sojourn_server.policies.cluster_preset import load_cluster_preset
from sojourn_server.routing import routing_events, routing_snapshot
from sojourn_server.routing.routed_programs import RoutedProgram
from sojourn_server.routing.routing_limits import RoutingLimits
from sojourn_server.routing.routing_snapshot import SavedProgram

PAGE = "".join(
    f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="1001"}} 1.0\n'
    for rank in range(2)
)


def described() -> EngineDescription:
    return EngineDescription(1, "i", 1000, 0, 0, 0, False, True)


class SlowProbe(EngineProbe):
    """Gets no answer to ``left_out``."""

    left_out = "/v1/models"

    async def get(self, path: str) -> tuple[int, str]:
        if path == self.left_out:
            return 0, ""
        if path == "/metrics":
            return 200, PAGE
        if path == "/v1/models":
            return 200, '{"data":[{"id":"tiny","max_model_len":4096}]}'
        return 200, '{"name":"sojourn","engine":{"max_num_seqs":8,"block_size":16,"num_blocks":1001}}'


async def test_an_engine_is_what_it_was_while_it_leaves_out_a_part(tmp_path: Path) -> None:
    it = EngineProcess(["x"], engine_id="e", host="127.0.0.1", log_dir=tmp_path)
    it._probe = probe = SlowProbe("http://e", it._http)
    for _ in range(MAX_PARTIAL_DESCRIPTIONS - 1):
        assert await it.describe() is None
    first = await it.describe()
    assert first is not None
    assert first.max_context_tokens == 0
    probe.left_out = ""
    whole = await it.describe()
    assert whole is not None
    assert (whole.ranks, whole.max_running, whole.max_context_tokens) == (2, 8, 4096)
    for probe.left_out in ("/metrics", "/sojourn/v1/capabilities", "/v1/models"):
        assert await it.describe() == whole


def places(count: int) -> dict[str, ReplicaInfo]:
    return {
        name: ReplicaInfo(name, "u", None, described(), "up", True, True)
        for name in (f"r{number}" for number in range(count))
    }


def test_where_many_go_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def counting(self: OpenRequest, name: str, _get: Any = object.__getattribute__) -> Any:
        nonlocal looked
        looked += name == "prefill_id"
        return _get(self, name)

    it = OpenRequests()
    ones = [it.add(routing_events.RequestReceived(str(number), "t", 10), 0.0) for number in range(300)]
    monkeypatch.setattr(OpenRequest, "__getattribute__", counting, raising=False)
    at: dict[str, int] = {}
    for one in ones:
        decided = it.decide(one, places(3), None, 5.0)
        assert isinstance(decided, routing_events.SendRequest)
        one.set_destination(decided)
        at[decided.replica_id] = at.get(decided.replica_id, 0) + 1
    assert set(at.values()) == {100}
    assert looked <= 2 * len(ones)


def test_a_request_that_two_replicas_died_of_goes_to_no_third() -> None:
    it = OpenRequests()
    one = it.add(routing_events.RequestReceived("q", "t", 10), 0.0)
    one.failed_at, one.failures_computing = ["r0", "r1"], 1
    assert isinstance(it.decide(one, places(4), None, 1.0), routing_events.SendRequest)
    one.failures_computing = 2
    refused = it.decide(one, places(4), None, 1.0)
    assert isinstance(refused, routing_events.RejectRequest)
    assert refused.code == "replicas_failed"


def test_a_checkpoint_is_never_readable_by_other_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    draft = tmp_path / "c.7.tmp"
    draft.write_bytes(b"left over")
    draft.chmod(0o644)
    modes = []
    replace = coordinator_checkpoint.os.replace  # type: ignore[attr-defined]
    monkeypatch.setattr(coordinator_checkpoint.os, "chmod", lambda *_: None)  # type: ignore[attr-defined]

    def replaced(source: Path, target: Path) -> None:
        modes.append(stat.S_IMODE(source.stat().st_mode))
        replace(source, target)

    monkeypatch.setattr(coordinator_checkpoint.os, "replace", replaced)  # type: ignore[attr-defined]
    write_checkpoint(path, CoordinatorCheckpoint(epoch=7, unix_s=0.0, core=None, engines={}))
    assert modes == [0o600]


async def test_gateways_are_answered_between_the_slices_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_snapshot, "SNAPSHOT_SLICE", 4)
    copied = longest = 0
    copy = routing_snapshot._saved_program

    def counted(program: RoutedProgram) -> SavedProgram:
        nonlocal copied, longest
        copied += 1
        longest = max(longest, copied)
        return copy(program)

    monkeypatch.setattr(routing_snapshot, "_saved_program", counted)
    path = tmp_path / "c"
    options = CoordinatorOptions(checkpoint=path, checkpoint_s=0.001)
    it = Coordinator(load_cluster_preset("sojourn"), RoutingLimits(), options)
    for number in range(30):
        it.core.take(routing_events.RequestReceived(f"r{number}", "t", 10, f"p{number}"), 0.0)
    run = it.begin()

    def saved() -> int:
        kept = read_checkpoint(path)
        return len(kept.core.programs) if kept is not None and kept.core is not None else 0

    while not saved():
        copied = 0
        await asyncio.sleep(0)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert (longest, saved()) == (4, 30)


def coordinator(wall_s: float) -> Coordinator:
    preset = load_cluster_preset("sojourn")
    return Coordinator(preset, RoutingLimits(), CoordinatorOptions(), wall=lambda: wall_s)


async def test_a_clock_that_was_set_back_deposes_no_new_coordinator() -> None:
    before = await coordinator(10_000.0).join(JoinRequest("g", 0, (), 1))
    it = coordinator(9_000.0)
    first = await it.join(JoinRequest("other", 0, (), 1))
    registered = await it.register(EngineRegistration("e", "http://h:1", described(), before.epoch))
    assert registered.status is ResponseStatus.OK
    assert registered.epoch > before.epoch
    listened = await it.listen(PollRequest("other", first.epoch, 0, -1, -1, 1))
    assert listened.status is ResponseStatus.JOIN
    joined = await it.join(JoinRequest("g", before.epoch, (), 2))
    assert (joined.status, joined.epoch) == (ResponseStatus.OK, registered.epoch)
    assert it.core.journal.life == str(it.epoch)


async def test_one_that_has_had_requests_gives_way_to_a_later_one() -> None:
    it = coordinator(9_000.0)
    joined = await it.join(JoinRequest("g", 0, (), 1))
    await it.tell(
        ReportRequest("g", joined.epoch, 0, (routing_events.RequestReceived("q", "t", 10),), join=1)
    )
    assert (await it.join(JoinRequest("other", joined.epoch + 1, (), 1))).status is ResponseStatus.DEPOSED
    assert it.deposed
