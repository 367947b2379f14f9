"""The flags for an engine of a pair."""

from __future__ import annotations

import json

import pytest
from sojourn_server.launch.engine_flags import InvalidOption
from sojourn_server.launch.kv_options import KvOffloadOptions, PrefillDecodeOptions
from sojourn_server.launch.serve_command import LaunchEnvironment, ServeOptions, build_command

GIB = 1 << 30
HOST = "n1.example"


def build(*args, role="prefill", store="/kv", cpu=True, policy="observe", environ=None, tiers=None, **pair):
    facts = LaunchEnvironment(
        python="/python", cpu_build=cpu, has_vllm_cli=True, plugins=("a",), hostname=HOST
    )
    options = ServeOptions(
        model="m",
        model_path="m",
        policy=policy,
        tiers=tiers or KvOffloadOptions(),
        pair=PrefillDecodeOptions(role=role, store=store, **pair),
        engine_args=args,
    )
    return build_command(options, facts, environ or {})


def config(command):
    return json.loads(command.argv[command.argv.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("policy", ["observe", "stock"])
def test_a_role_and_a_store_are_enough(role, policy):
    command = build("--port", "8123", role=role, policy=policy)
    told = config(command)
    assert told["kv_connector_extra_config"] == {
        "role": role,
        "node": HOST,
        "listen": "tcp:127.0.0.1:0",
        "store": "/kv",
        "store_name": f"{HOST}-{role}-8123",
        "store_bytes": 16 * GIB,
        "buffer_bytes": GIB,
    }
    assert (told["kv_connector"], told["kv_role"]) == ("PathsConnector", "kv_both")
    assert told["kv_load_failure_policy"] == "recompute"
    assert command.env["PYTHONHASHSEED"] == "0"
    assert command.env["VLLM_PLUGINS"] == "a,sojourn", "or nobody could ask it where it listens"
    assert ("--scheduler-cls" in command.argv) == (policy != "stock")


@pytest.mark.parametrize(
    ("host_gib", "expected"),
    [("2", {"host_bytes": 2 * GIB}), ("auto", {"host_bytes": "auto", "host_bytes_max": 0})],
)
def test_a_prefill_engine_has_host_memory(host_gib, expected):
    command = build(tiers=KvOffloadOptions(host_gib=host_gib), policy="sojourn", cpu=False)
    told = config(command)
    assert command.argv.count("--kv-transfer-config") == 1
    assert "--disable-hybrid-kv-cache-manager" in command.argv, "transfers support one group"
    assert (told["kv_connector"], told["kv_load_failure_policy"]) == ("PairConnector", "recompute")
    extra = told["kv_connector_extra_config"]
    assert extra.pop("host") == expected, "in vLLM's layout, which the decode engine has too"
    assert extra == config(build())["kv_connector_extra_config"]


def test_options_are_passed_on():
    command = build(
        store_gib=2.5,
        store_name="mine",
        listen="tcp:10.0.0.7:8500",
        node="n7",
        buffer_gib=0.25,
        environ={"PYTHONHASHSEED": "7"},
    )
    extra = config(command)["kv_connector_extra_config"]
    assert (extra["store_name"], extra["listen"], extra["node"]) == ("mine", "tcp:10.0.0.7:8500", "n7")
    assert (extra["store_bytes"], extra["buffer_bytes"]) == (2.5 * GIB, 0.25 * GIB)
    assert "PYTHONHASHSEED" not in command.env, "the user's own, the same for all engines"


@pytest.mark.parametrize(
    ("node", "args", "expected"),
    [
        (None, (), f"{HOST}-prefill-8000"),
        (None, ("--uds", "/s"), f"{HOST}-prefill"),
        ("a node/2", (), "a-node-2-prefill-8000"),
        ("_.", (), "node-prefill-8000"),
        ("x" * 90, (), "x" * 51 + "-prefill-8000"),
    ],
)
def test_each_engine_of_a_node_has_a_name(node, args, expected):
    name = config(build(*args, node=node))["kv_connector_extra_config"]["store_name"]
    assert name == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"role": None}, "for an engine of a pair: add --role"),
        ({"role": "both"}, "--role is 'both'; expected prefill or decode"),
        ({"store": None}, "--role prefill needs --kv-store"),
        ({"store_gib": 0}, "--kv-store-gib is 0; expected a size"),
        ({"buffer_gib": -1}, "--kv-buffer-gib is -1; expected a size"),
        (
            {"listen": "10.0.0.7"},
            "--kv-listen: '10.0.0.7' is not an address; expected unix:PATH or tcp:HOST:PORT",
        ),
        ({"listen": "tcp:10.0.0.7"}, "--kv-listen: 'tcp:10.0.0.7' is not an address"),
        ({"listen": "tcp:h:70000"}, "--kv-listen: 'tcp:h:70000' is not an address"),
        ({"listen": "nixl:h:1"}, "--kv-listen: 'nixl:h:1' is not an address"),
        ({"node": " "}, "--kv-node is ' '"),
        ({"tiers": KvOffloadOptions(host_gib="1"), "role": "decode"}, "prefill engines keep the contexts"),
        ({"tiers": KvOffloadOptions(host_gib="1", disk="/d")}, "--kv-disk: the disk of a pair is --kv-store"),
        ({"tiers": KvOffloadOptions(host_gib="1", backend="vllm")}, "host memory of a pair is sojourn's"),
        ({"tiers": KvOffloadOptions(host_gib="1"), "policy": "stock"}, "needs our scheduler"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_what_was_expected(options, said):
    with pytest.raises(InvalidOption, match=said):
        build(**options)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--kv-transfer-config", "{}"), "give one of the two"),
        (("--data-parallel-size", "2"), "an engine of a pair needs a server of its own"),
        (("--speculative-config", "{}"), "--speculative-config: .*; start an engine of a pair without it"),
        (("-sc", "{}"), "--speculative-config: .*; start an engine of a pair without it"),
        (("-sc.method=ngram",), "--speculative-config: .*; start an engine of a pair without it"),
        (
            ("--enable-lora",),
            "--enable-lora: KV of an adapter .* weights; start an engine of a pair without it",
        ),
        (("--enable_lora",), "--enable-lora: "),
        (
            ("--no-enable-prefix-caching",),
            "--no-enable-prefix-caching: stored KV is found by the block hashes",
        ),
        (("--block-size", "128"), "--block-size is 128: a Full Block of 64 tokens is not a whole number"),
    ],
    ids=str,
)
def test_engines_that_would_refuse_to_start_are_refused_at_once(args, said):
    with pytest.raises(InvalidOption, match=said):
        build(*args)
