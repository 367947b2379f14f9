"""Parts of the HTTP gateway by themselves: what is read of requests, answers, engines and tenants' files."""

from __future__ import annotations

import asyncio
import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn.errors import InputError
from sojourn_server.gateway.http.engine_client import ResponseMeter
from sojourn_server.gateway.http.engine_monitor import DEFAULT_CAPACITY_TOKENS, describe_engine
from sojourn_server.gateway.http.gateway_server import (
    MAX_OPEN_FILES,
    OTHER_FILES,
    raise_open_file_limit,
    uvicorn_settings,
)
from sojourn_server.gateway.http.generation_request import ClientDisconnected
from sojourn_server.gateway.http.replica_addresses import ReplicaAddresses, parse_engine_url, rank_addresses
from sojourn_server.gateway.http.routing_backend import RequestDecisions, RoutingBackend
from sojourn_server.gateway.http.tenant_keys import DEFAULT_TENANT, TenantKeys, load_tenant_keys
from sojourn_server.policies.cluster_preset import cluster_preset_names, load_cluster_preset
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_from_preset import build_routing_core

# -- answers ----------------------------------------------------------------------


@given(
    st.lists(
        st.sampled_from(
            [
                b"data: x\n\n",
                b"event: e\ndata: {}\n\n",
                b"data: \xc3\xbc\r\n\r\n",
                b": ping\n",
                b": ping\r\n\r\n",
                b"data: x\r\r",
                b"data: x\n: y\n\n",
            ]
        )
    ),
    st.data(),
)
def test_a_stream_cut_anywhere_comes_through_in_whole_events(
    events: list[bytes], data: st.DataObject
) -> None:
    text = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    through = ResponseMeter(is_stream=True)
    passed = b""
    for chunk in chunks:
        passed += through.push(chunk)
        *_, last = re.split(rb"(?:\r\n?|\n){2}", b"\n\n" + passed)
        assert re.fullmatch(rb"(:.*|[\r\n])*", last), "only comments follow the last event"
        assert not passed or passed.endswith((b"\r", b"\n"))
    assert passed + through.rest() == text


def test_token_counts_are_read_from_an_answer() -> None:
    meter = ResponseMeter(is_stream=False)
    meter.push(b'{"id": "resp_1", "usage": {"input_tokens": 7, "output_tokens": 3}}')
    assert (meter.counts(), meter.response_id) == ((7, 3), "resp_1")
    stream = ResponseMeter(is_stream=True)
    for _ in range(5):
        stream.push(b'data: {"choices": []}\n\n')
    stream.push(b"data: [DONE]\n\n")
    assert stream.counts() == (None, 5)
    stream.push(b'data: {"usage": {"prompt_tokens": 9, "completion_tokens": 20}}\n\n')
    assert stream.counts() == (9, 20)


def test_a_prompt_of_the_messages_api_is_what_the_cache_had_and_the_rest() -> None:
    usage = {"output_tokens": 3, "cache_read_input_tokens": 8000, "cache_creation_input_tokens": 20}
    anthropic = ResponseMeter(is_stream=True)
    anthropic.push(b'event: message_delta\ndata: {"type": "message_delta", "delta": {}, "usage": ')
    anthropic.push(json.dumps({"input_tokens": 10, **usage}).encode() + b"}\n\n")
    assert anthropic.counts() == (8030, 3)
    openai = ResponseMeter(is_stream=False)
    details = {"input_tokens": 8030, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 8000}}
    openai.push(json.dumps({"id": "resp_1", "usage": details}).encode())
    assert openai.counts() == (8030, 3)


# -- engines ----------------------------------------------------------------------

CACHE = 'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="{blocks}"}} 1.0\n'


def test_an_engine_with_ranks_is_several_replicas() -> None:
    metrics = "process_start_time_seconds 1.5e9\n" + "".join(
        CACHE.format(rank=r, blocks=101) for r in range(4)
    )
    found = describe_engine({"engines": 4}, metrics, {"data": [{"id": "m", "max_model_len": 2048}]}, 0)
    assert found.ranks == 4
    assert found.registered.capacity_tokens == 1600
    assert found.registered.max_context_tokens == 2048
    assert found.registered.instance == "1.5e9"
    assert [a.replica_id for a in rank_addresses("http://h:1", 4)] == ["h:1/0", "h:1/1", "h:1/2", "h:1/3"]
    assert [a.rank for a in rank_addresses("http://h:1", 1)] == [None]
    replicas = ReplicaAddresses()
    for address in rank_addresses("http://h:1", 4) + rank_addresses("http://h:2", 1):
        replicas[address.replica_id] = address
    assert [a.url for a in replicas.engines()] == ["http://h:1", "http://h:2"]


def test_plain_vllm_reports_its_size_and_other_servers_do_not() -> None:
    plain = describe_engine({}, CACHE.format(rank=0, blocks=11), {}, 0)
    assert plain.registered.capacity_tokens == 160
    stranger = describe_engine({}, "", {}, 2)
    assert stranger.registered.capacity_tokens == DEFAULT_CAPACITY_TOKENS
    assert stranger.registered.instance == "life 2"
    assert not stranger.speaks_sojourn


def test_an_engine_with_sojourn_reports_its_tiers() -> None:
    engine = {"block_size": 32, "num_blocks": 11, "max_num_seqs": 8}
    tiers = {"on": True, "host": {"blocks": 5, "bytes": 1}, "disk": {"blocks": 9, "bytes": 1, "shared": True}}
    found = describe_engine({"name": "sojourn", "engine": engine, "tiers": tiers}, "", {}, 0)
    seen = found.registered
    assert (seen.capacity_tokens, seen.host_tokens, seen.max_running) == (320, 160, 8)
    assert found.shares_disk
    off = describe_engine({"name": "sojourn", "engine": engine, "tiers": {**tiers, "on": False}}, "", {}, 0)
    assert (off.registered.host_tokens, off.shares_disk) == (0, False)


@pytest.mark.parametrize(
    ("wrong", "unfit"),
    [
        ({}, ""),
        *(
            ({"paths": wrong}, "what it reports of its KV paths is invalid")
            for wrong in ({"node": " "}, {"block_s": -1.0}, {"block_bytes": 0})
        ),
        ({"engines": 2}, "it has data-parallel ranks"),
    ],
)
def test_an_engine_whose_paths_are_invalid_or_shared_is_in_no_pair(wrong: dict[str, Any], unfit: str) -> None:
    paths = {
        "role": "decode",
        "peer": "tcp:h:1",
        "node": "n",
        "epoch": "e",
        "block_bytes": 1,
        "block_tokens": 1,
    }
    capabilities = {**wrong, "paths": {**paths, **wrong.get("paths", {})}}
    found = describe_engine(capabilities, "", {}, 0)
    assert (found.unfit[: len(unfit) or None], found.kind is None) == (unfit, bool(unfit))
    capabilities["paths"]["epoch"] = "later"
    again = describe_engine(capabilities, "", {}, 0)
    has_paths = found.paths is not None
    assert (found.registered.instance != again.registered.instance) is has_paths, "its KV is lost"


@pytest.mark.parametrize(
    "text", ["localhost", "ftp://h", "http://h:99999", "http://h:0", "http://h/v1", "http://u:word@h"]
)
def test_bad_addresses_say_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match="not an engine's address; expected http://HOST") as caught:
        parse_engine_url(text)
    assert "word" not in str(caught.value)
    assert parse_engine_url(" http://h:8000/ ") == "http://h:8000"
    assert parse_engine_url("localhost:8000") == "http://localhost:8000"


# -- tenants ----------------------------------------------------------------------


def test_a_file_of_tenants(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants]\na = ["k1", "env:K2"]\nb = "k3"\n')
    tenants = load_tenant_keys(file, environment={"K2": "k2"})
    assert tenants.names == ("a", "b")
    assert [tenants.tenant_of(f"Bearer {key}") for key in ("k1", "k2", "k3", "k4")] == ["a", "a", "b", None]
    assert tenants.tenant_of("bearer k1") == "a"
    assert tenants.tenant_of("Basic k1") is None
    assert tenants.tenant_of(None) is None
    assert tenants.tenant_of(None, "k3") == "b"
    assert TenantKeys().tenant_of(None) == DEFAULT_TENANT
    assert not TenantKeys().checks


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tenants = ", "not TOML"),
        ("x = 1", "expected \\[tenants\\] with lines"),
        ("[tenants]\na = [1]", "the keys of a: Expected `str`, got `int`"),
        ("[tenants]\na = 'k'\nb = 7", "the keys of b: .* got `int`.*expected \\[tenants\\] with lines"),
        ("[tenants]", "no tenants"),
        ("[tenants]\na = []\nb = 'k'", "a key of a cannot be used: it has spaces or is empty"),
        ('[tenants]\na = [""]', "empty"),
        ('[tenants]\na = ["env:NOT_THERE"]', "has no NOT_THERE"),
        ('[tenants]\na = ["same"]\nb = ["same"]', "a and b have the same key"),
    ],
)
def test_bad_files_of_tenants_say_what_was_wrong_and_no_key(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=told) as caught:
        load_tenant_keys(file, environment={})
    assert "same'" not in str(caught.value)
    with pytest.raises(InputError, match="No such file"):
        load_tenant_keys(tmp_path / "none.toml")


# -- documents --------------------------------------------------------------------


def test_the_page_lists_every_cluster_preset_and_its_engine() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text("utf-8")
    table = page.partition("<!-- cluster presets -->")[2].partition("<!-- /cluster presets -->")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    assert {row[0]: row[2] for row in rows} == {
        name: load_cluster_preset(name).engine for name in cluster_preset_names()
    }


# -- decisions --------------------------------------------------------------------


@pytest.mark.parametrize("spare", [True, False])
def test_a_request_that_ends_at_an_engine_that_is_lost_is_over(spare: bool) -> None:
    core = build_routing_core(load_cluster_preset("sojourn"))
    routing_backend = RoutingBackend(core, lambda: 100.0)
    a, b = (routing_events.ReplicaRegistered(name, "1", 1000) for name in "ab")
    routing_backend.tell(a)
    decisions = routing_backend.open(routing_events.RequestReceived("r", "t", 10, program_id="p"))
    if spare:
        routing_backend.tell(b)
    decisions.mark_answered()
    routing_backend.tell(routing_events.ReplicaGone("a", "1"))
    routing_backend.close(routing_events.RequestFinished("r", 5, "a"))
    assert (core.requests, core.waiting, core.program_statuses()) == ({}, {}, [])
    routing_backend.tell(b)
    assert [one.in_flight for one in core.replica_statuses()] == [0]


async def test_what_is_done_for_a_ticket_is_broken_off_by_news() -> None:
    decisions = RequestDecisions("r0")

    async def answer() -> str:
        await asyncio.sleep(0.01)
        return "answer"

    assert await decisions.unless_decided(answer()) == "answer"
    asyncio.get_running_loop().call_later(
        0.01, decisions.add_decision, routing_events.RecallRequest("r0", "a")
    )
    assert await decisions.unless_decided(asyncio.sleep(60, "too late")) is None
    assert await decisions.unless_decided(answer()) is None  # there is news still
    assert isinstance(decisions.take(), routing_events.RecallRequest)
    decisions.mark_client_disconnected()
    assert await decisions.unless_decided(answer()) is None
    with pytest.raises(ClientDisconnected):
        decisions.take()


# -- open files


@pytest.mark.parametrize(
    ("soft", "hard", "most_waiting", "limit", "warns"),
    [
        (1024, 1 << 20, 20_000, MAX_OPEN_FILES, False),
        (1024, resource.RLIM_INFINITY, 20_000, MAX_OPEN_FILES, False),
        (1024, 1 << 20, 100_000, 200_000, False),
        (1024, 4096, 20_000, 4096, True),
        (1024, 30_000, 20_000, 30_000, False),
        (100, 100, 20_000, 100, True),
        (1 << 20, 1 << 20, 20_000, 1 << 20, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 20_000, resource.RLIM_INFINITY, False),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(
    soft: int,
    hard: int,
    most_waiting: int,
    limit: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    assert raise_open_file_limit(most_waiting) == (limit if limit != resource.RLIM_INFINITY else None)
    assert limits[-1] == (limit, hard)
    # uvicorn refuses a request if this many connections are open, that of the request included.
    most = max(1, (limit - OTHER_FILES) // 2) + 1
    assert uvicorn_settings()["limit_concurrency"] == (most if limit > 0 else None)
    assert bool(caplog.records) == warns
