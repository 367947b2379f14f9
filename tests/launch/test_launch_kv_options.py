"""The flags for KV below the device, and for an engine of a pair."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from sojourn_server.launch.engine_flags import InvalidOption
from sojourn_server.launch.kv_options import (
    CACHE_POLICY,
    OFFLOAD_CONNECTOR,
    VLLM_CONNECTOR,
    KvOffloadOptions,
    PrefillDecodeOptions,
)
from sojourn_server.launch.serve_command import LaunchEnvironment, ServeOptions, build_command

GIB = 1 << 30
HAS = {"available_bytes": 100 * GIB}


HOST = "n1.example"
HOST_1 = {"host_gib": "1"}
DISK = {"disk": "/d", "disk_gib": 1}
PAIR = {"role": "prefill", "store": "/kv"}
NOT_IN_A_PAIR = "start an engine of a pair without it"


def build(*args, cpu=True, environ=None, facts=None, **given):
    """The command for ``args``. ``given``: options of the command, of host memory and disk, or of a pair."""
    machine = LaunchEnvironment(
        python="/python", cpu_build=cpu, has_vllm_cli=True, hostname=HOST, plugins=("a",), **(facts or {})
    )
    tiers, pair = (
        kind(**{each.name: given.pop(each.name) for each in fields(kind) if each.name in given})
        for kind in (KvOffloadOptions, PrefillDecodeOptions)
    )
    options = {"model": "m", "model_path": "m", "policy": "continuum", **given}
    return build_command(
        ServeOptions(**options, tiers=tiers, pair=pair, engine_args=args), machine, environ or {}
    )


def config(command):
    return json.loads(command.argv[command.argv.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize(
    ("args", "layout"),
    [
        ([], "BLHNC"),
        (["--block-size", "64"], "BLHNC"),
        (["--block-size=128"], None),
        (["--block-size=x"], None),
    ],
)
def test_on_cuda_a_block_is_one_run_of_bytes_unless_vllm_may_have_to_split_it(args, layout):
    extra = config(build(*args, cpu=False, host_gib="1"))["kv_connector_extra_config"]
    assert extra.get("kv_layout") == layout


@pytest.mark.parametrize(
    ("environ", "set_to"), [({}, "0"), ({"PYTHONHASHSEED": "random"}, "0"), ({"PYTHONHASHSEED": "7"}, None)]
)
def test_blocks_on_disk_need_hashes_that_stay(environ, set_to):
    command = build(host_gib="1", disk="/d", disk_gib=10, environ=environ)
    extra = config(command)["kv_connector_extra_config"]
    assert extra == {"host_bytes": GIB, "disk": "/d", "disk_bytes": 10 * GIB}
    assert command.env.get("PYTHONHASHSEED") == set_to


@pytest.mark.parametrize(
    ("args", "options", "times"),
    [
        ((), {}, 0),
        (("-pp", "1"), {}, 0),
        (("-pp", "2"), {}, 1),
        (("--pipeline-parallel-size=2",), {}, 1),
        ((), DISK, 1),
        (("--disable-hybrid-kv-cache-manager",), DISK, 1),
        (("--no-disable-hybrid-kv-cache-manager",), DISK, 0),
    ],
)
def test_where_several_groups_are_not_supported_vllm_makes_one(args, options, times):
    command = build(*args, host_gib="1", **options)
    assert command.argv.count("--disable-hybrid-kv-cache-manager") == times


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize(
    ("size", "expected"), [("2", {"cpu_bytes_to_use": 2 * GIB}), ("auto", {"host_bytes_max": 50 * GIB})]
)
def test_vllms_own_connector_keeps_outputs_too(cpu, size, expected):
    told = config(build(host_gib=size, backend="vllm", cpu=cpu, facts=HAS))
    assert told["kv_connector"] == VLLM_CONNECTOR
    assert told["kv_load_failure_policy"] == "recompute"
    spec = {"spec_name": "ProgramOffloadingSpec", "spec_module_path": told["kv_connector_module_path"]}
    extra = {**expected, **spec, "offload_prompt_only": False}
    assert told["kv_connector_extra_config"] == {**extra, **CACHE_POLICY}


@pytest.mark.parametrize(
    ("args", "options", "connector", "why"),
    [
        ((), {"host_gib": "1"}, OFFLOAD_CONNECTOR, "it serves this model"),
        ((), {"host_gib": "1", "only_vllm": "m keeps a state"}, VLLM_CONNECTOR, "m keeps a state"),
        ((), {"host_gib": "auto", "only_vllm": "m keeps a state"}, VLLM_CONNECTOR, "m keeps a state"),
        ((), {"cpu": False, "only_vllm": "m keeps a state"}, VLLM_CONNECTOR, "m keeps a state"),
        ((), {"cpu": False, "backend": "vllm"}, VLLM_CONNECTOR, None),
        ((), {"host_gib": "1", "policy": "stock"}, VLLM_CONNECTOR, "policy stock"),
        ((), {"host_gib": "auto", "policy": "stock"}, VLLM_CONNECTOR, "policy stock"),
        (("--decode-context-parallel-size", "2"), {"host_gib": "1"}, VLLM_CONNECTOR, "splits the tokens"),
        (("--kv-cache-dtype-skip-layers", "0"), {"host_gib": "1"}, VLLM_CONNECTOR, "mixed precision"),
        ((), {"host_gib": "1", "disk": "/d", "disk_gib": 1, "only_vllm": "x"}, OFFLOAD_CONNECTOR, "no disk"),
        ((), {"host_gib": "1", "backend": "sojourn"}, OFFLOAD_CONNECTOR, None),
    ],
)
def test_auto_takes_vllms_connector_where_ours_does_not_serve_the_model_and_says_so(
    args, options, connector, why
):
    command = build(*args, **{"facts": HAS, **options})
    assert config(command)["kv_connector"] == connector
    lines = [line for line in command.warnings if line.startswith("host memory by")]
    assert [why in line for line in lines] == [True] * (why is not None)


@pytest.mark.parametrize(
    ("args", "gib"),
    [
        ((), 50),
        (("--data-parallel-size", "5"), 10),
        (("-dp", "8", "-dpl=2", "-tp", "4"), 25),
        (("-tp", "4"), 50),
        (("-pp", "2"), 50),
    ],
)
def test_on_cuda_an_engine_takes_its_part_of_half_of_the_free_memory(args, gib):
    command = build(*args, cpu=False, facts=HAS)
    extra = config(command)["kv_connector_extra_config"]
    assert extra == {"host_bytes": "auto", "host_bytes_max": gib * GIB, "kv_layout": "BLHNC"}
    assert "--disable-hybrid-kv-cache-manager" not in command.argv


@pytest.mark.parametrize(
    ("args", "options", "line"),
    [
        ((), {"cpu": True}, None),
        ((), {"host_gib": "0"}, None),
        ((), {"host_gib": "0.0", "role": "decode", "store": "/s"}, None),
        ((), {"policy": "stock"}, None),
        ((), {"role": "prefill", "store": "/s"}, None),
        (("--kv-transfer-config.kv_connector", "NixlConnector"), {}, None),
        (("--kv-offloading-size=8",), {}, None),
        ((), {"facts": {**HAS, "unified_memory": True}}, "the GPU's memory is this machine's"),
        (("--no-enable-prefix-caching",), {}, "block hashes of prefix caching"),
        ((), {"environ": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, "expandable_segments"),
        ((), {"model_refusal": "m has an encoder"}, "m has an encoder"),
        ((), {"model_refusal": "m has an encoder", "host_gib": "auto", "cpu": True}, "m has an encoder"),
        ((), {"only_vllm": "m keeps a state", "backend": "sojourn"}, "m keeps a state"),
    ],
)
def test_where_auto_is_no_host_memory_a_line_says_why(args, options, line):
    command = build(*args, **{"cpu": False, "facts": HAS, **options})
    assert not any(name in " ".join(command.argv) for name in (OFFLOAD_CONNECTOR, VLLM_CONNECTOR))
    said = [text for text in command.warnings if text.startswith("no host memory for KV")]
    assert [line in text for text in said] == [True] * (line is not None)


# -- an engine of a pair ----------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("policy", ["observe", "stock"])
def test_a_role_and_a_store_are_enough(role, policy):
    command = build("--port", "8123", role=role, store="/kv", policy=policy)
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
    [("2", {"host_bytes": 2 * GIB}), ("auto", {"host_bytes": "auto", "host_bytes_max": 50 * GIB})],
)
def test_a_prefill_engine_has_host_memory_also_where_it_is_the_devices_memory(host_gib, expected):
    command = build(**PAIR, host_gib=host_gib, cpu=False, facts={**HAS, "unified_memory": True})
    told = config(command)
    assert command.argv.count("--kv-transfer-config") == 1
    assert "--disable-hybrid-kv-cache-manager" in command.argv, "transfers support one group"
    assert (told["kv_connector"], told["kv_load_failure_policy"]) == ("PairConnector", "recompute")
    extra = told["kv_connector_extra_config"]
    assert extra.pop("host") == expected, "in vLLM's layout, which the decode engine has too"
    assert extra == config(build(**PAIR))["kv_connector_extra_config"]


def test_options_are_passed_on():
    told = {"store_name": "mine", "listen": "tcp:10.0.0.7:8500", "node": "n7"}
    command = build(**PAIR, **told, store_gib=2.5, buffer_gib=0.25, environ={"PYTHONHASHSEED": "7"})
    extra = config(command)["kv_connector_extra_config"]
    assert told.items() <= extra.items()
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
    name = config(build(*args, **PAIR, node=node))["kv_connector_extra_config"]["store_name"]
    assert name == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (DISK, "--kv-host-gib"),
        ({"backend": "vllm"}, "--kv-host-gib"),
        ({**HOST_1, "disk": "/d"}, "--kv-disk-gib"),
        ({"disk_gib": 1}, "a disk needs --kv-disk DIRECTORY, --kv-disk-gib GIB and --kv-host-gib GIB"),
        ({"host_gib": "0", **DISK}, "give --kv-host-gib"),
        ({"host_gib": "nan"}, "--kv-host-gib is nan"),
        ({"host_gib": "-1"}, "--kv-host-gib is -1"),
        ({"host_gib": "much"}, "--kv-host-gib is 'much'; expected GiB, auto or 0"),
        ({**HOST_1, "disk": "/d", "disk_gib": -1}, "--kv-disk-gib is -1"),
        ({**HOST_1, "backend": "lmcache"}, "expected sojourn, vllm or auto"),
        ({**HOST_1, **DISK, "backend": "vllm"}, "host memory only"),
        ({**HOST_1, "policy": "stock", "backend": "sojourn"}, "choose a policy"),
        ({"host_gib": "auto", "policy": "stock", "backend": "sojourn"}, "choose a policy"),
        (
            {**HOST_1, "args": ["--no-enable-prefix-caching"]},
            "--no-enable-prefix-caching: .*; leave out .* or --kv-host-gib",
        ),
        ({**HOST_1, "args": ["--kv-transfer-config", "{}"]}, "either that flag or --kv-host-gib"),
        # an engine of a pair
        ({**PAIR, "role": None}, "for an engine of a pair: add --role"),
        ({**PAIR, "role": "both"}, "--role is 'both'; expected prefill or decode"),
        ({**PAIR, "store": None}, "--role prefill needs --kv-store"),
        ({**PAIR, "store_gib": 0}, "--kv-store-gib is 0; expected a size"),
        ({**PAIR, "buffer_gib": -1}, "--kv-buffer-gib is -1; expected a size"),
        (
            {**PAIR, "listen": "10.0.0.7"},
            "--kv-listen: '10.0.0.7' is not an address; expected unix:PATH or tcp:HOST",
        ),
        ({**PAIR, "listen": "tcp:10.0.0.7"}, "--kv-listen: 'tcp:10.0.0.7' is not an address"),
        ({**PAIR, "listen": "tcp:h:70000"}, "--kv-listen: 'tcp:h:70000' is not an address"),
        ({**PAIR, "listen": "nixl:h:1"}, "--kv-listen: 'nixl:h:1' is not an address"),
        ({**PAIR, **HOST_1, "role": "decode"}, "prefill engines keep the contexts"),
        ({**PAIR, "host_gib": "auto", "role": "decode"}, "prefill engines keep"),
        ({**PAIR, **HOST_1, "disk": "/d"}, "--kv-disk: the disk of a pair is --kv-store"),
        ({**PAIR, **HOST_1, "backend": "vllm"}, "host memory of a pair is sojourn's"),
        ({**PAIR, **HOST_1, "policy": "stock"}, "needs our scheduler"),
        # which would refuse to start, minutes later
        ({**PAIR, "args": ["--kv-transfer-config", "{}"]}, "give one of the two"),
        ({**PAIR, "args": ["--data-parallel-size", "2"]}, "an engine of a pair needs a server of its own"),
        ({**PAIR, "args": ["--speculative-config", "{}"]}, f"--speculative-config: .*; {NOT_IN_A_PAIR}"),
        ({**PAIR, "args": ["-sc", "{}"]}, f"--speculative-config: .*; {NOT_IN_A_PAIR}"),
        ({**PAIR, "args": ["-sc.method=ngram"]}, f"--speculative-config: .*; {NOT_IN_A_PAIR}"),
        ({**PAIR, "args": ["--enable_lora"]}, f"--enable-lora: KV of an adapter .*; {NOT_IN_A_PAIR}"),
        (
            {**PAIR, "args": ["--no-enable-prefix-caching"]},
            "--no-enable-prefix-caching: stored KV is found by the block",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_what_was_expected(options, said):
    args = options.get("args", ())
    with pytest.raises(InvalidOption, match=said):
        build(*args, **{name: one for name, one in options.items() if name != "args"})
