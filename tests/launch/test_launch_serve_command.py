"""The engine's command line as a function of the user's options; no vLLM needed."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from sojourn_server.launch.engine_flags import InvalidOption
from sojourn_server.launch.serve_command import (
    SCHEDULER_CLS,
    SERVER_MAIN_MODULE,
    EngineFlags,
    LaunchEnvironment,
    ServeOptions,
    build_command,
    listen_address,
)

CPU = LaunchEnvironment(python="/py", cpu_build=True, has_vllm_cli=False, plugins=("lora",), cpus=(0, 1))
CUDA = LaunchEnvironment(python="/py", cpu_build=False, has_vllm_cli=True, plugins=(), cpus=tuple(range(32)))


def build(*args, facts=CUDA, environ=None, **options):
    options = {"model": "org/m", "model_path": "org/m", "policy": "continuum", **options}
    return build_command(ServeOptions(engine_args=args, **options), facts, environ or {})


def write(folder, text):
    pytest.importorskip("yaml")
    path = folder / "f.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def value(command, flag):
    return EngineFlags(command.argv).value(flag)


def sojourn_config(command):
    return json.loads(value(command, "--additional-config"))["sojourn"]


def test_stock_is_plain_vllm():
    command = build("--port", "1", policy="stock", environ={"VLLM_PLUGINS": "sojourn, mine"})
    assert command.argv == (
        "/py", "-m", "vllm.entrypoints.cli.main", "serve", "org/m",
        "--enable-prompt-tokens-details", "--port", "1",
    )  # fmt: skip
    assert command.env == {"VLLM_PLUGINS": "mine"}
    assert not any("sojourn" in part for part in [*command.argv, *command.env.values()])


def test_a_policy_brings_scheduler_plugin_and_settings():
    settings = {
        "policy": "continuum", "history_file": "/h", "profile_file": "/p", "lease_budget_fraction": 0.5,
        "max_hinted_ttl_s": 60.0, "session_header": "X-Run",
    }  # fmt: skip
    command = build(**settings, extra={"max_programs": 9})
    assert value(command, "--scheduler-cls") == SCHEDULER_CLS
    assert command.env["VLLM_PLUGINS"] == "sojourn"
    assert sojourn_config(command) == {**settings, "max_programs": 9}
    with pytest.raises(InvalidOption, match="plain vLLM"):
        build(**{**settings, "policy": "stock"})


THEIRS = {"other": [1], "sojourn": {"policy": "theirs", "k": 1}}


@pytest.mark.parametrize(
    "given",
    [
        ("--additional-config", json.dumps(THEIRS)),
        (f"--additional_config={json.dumps(THEIRS)}",),
        json.dumps({"additional-config": THEIRS}),
        f"additional_config: '{json.dumps(THEIRS)}'",
    ],
    ids=["flag", "flag=", "file", "text in a file"],
)
def test_the_users_additional_config_is_kept(given, tmp_path):
    args = ("--config", write(tmp_path, given)) if isinstance(given, str) else given
    command = build(*args, "--seed", "4")
    kept = json.loads(command.flags.value("--additional-config"))
    assert kept == {"other": [1], "sojourn": {"policy": "continuum", "k": 1}}
    assert sum(arg.startswith("--additional") for arg in command.argv) == 1
    assert command.argv[-2:] == ("--seed", "4")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--additional-config", "{"), "not JSON"),
        (("--additional-config", "[1]"), "expected an object"),
        (("--additional-config.sojourn.policy", "x"), "one JSON object"),
        (("--additional-config", '{"sojourn": 1}'), "sojourn is not an object"),
        (("--scheduler_cls=a.B",), "scheduler-cls"),
        (("--model", "x"), "first argument"),
    ],
)
def test_what_cannot_be_merged_is_refused(args, said):
    with pytest.raises(InvalidOption, match=said):
        build(*args)


@pytest.mark.parametrize(
    ("listed", "installed", "expected"),
    [
        (None, ("lora", "platform"), "lora,platform,sojourn"),
        ("mine", ("lora",), "mine,sojourn"),
        ("", ("lora",), "sojourn"),
        ("a,sojourn,b,a", (), "a,b,sojourn"),
    ],
)
def test_the_plugin_joins_the_others(listed, installed, expected):
    facts = LaunchEnvironment(python="/py", cpu_build=False, has_vllm_cli=True, plugins=installed)
    environ = {} if listed is None else {"VLLM_PLUGINS": listed}
    assert build(facts=facts, environ=environ).env["VLLM_PLUGINS"] == expected


def test_cpu_defaults_and_the_entry_without_metadata():
    command = build("--port", "1", facts=CPU)
    assert command.argv[:6] == (
        "/py", "-W", "ignore::DeprecationWarning:__main__", "-m", SERVER_MAIN_MODULE,
        "vllm.entrypoints.openai.api_server",
    )  # fmt: skip
    assert value(command, "--model") == "org/m"
    assert value(command, "--block-size") == "32"
    assert "--enforce-eager" in command.argv
    assert command.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


@pytest.mark.parametrize("args", [["--pipeline-parallel-size", "2"], ["-pp=2"]])
def test_pipeline_stages_on_a_cpu_make_a_first_pass(args):
    """With --enforce-eager there is none, and the second stage has no memory to receive in."""
    command = build(*args, facts=CPU)
    assert "--enforce-eager" not in command.argv
    assert json.loads(value(command, "--compilation-config")) == {"mode": 1, "backend": "eager"}
    for chosen in ("-O1", "-cc.mode=3", "--compilation_config.mode=3"):
        assert "--compilation-config" not in build(*args, chosen, facts=CPU).argv


@pytest.mark.parametrize(
    ("flags", "cpus", "cores"),
    [
        (("--tensor-parallel-size", "2"), 2, "0|1"),
        (("-pp", "2"), 2, "0|1"),
        (("-tp", "2", "-pp", "2"), 8, "0,1|2,3|4,5|6,7"),
        (("-tp", "2"), 10, "0,1,2,3|4,5,6,7"),  # two are left to the server
        (("-tp", "4"), 2, "nobind"),  # there are not enough
        (("-tp", "1"), 2, "0,1"),
    ],
)
def test_each_worker_gets_cores_of_its_own_where_vllm_would_not_start(flags, cpus, cores):
    command = build(*flags, facts=replace(CPU, cpus=tuple(range(cpus))))
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == cores


def test_an_engine_on_cpus_starts_with_the_shared_memory_of_a_container():
    """vLLM wants 240 MiB for each queue between an engine and its worker; Docker's default is 64 MiB."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    small = replace(CPU, shared_memory_bytes=64 << 20)
    assert build(facts=small).env[name] == "0"
    assert build(policy="stock", facts=small).env[name] == "0"
    assert name not in build("-tp", "2", facts=small).env, "two workers need it: vLLM says how to get more"
    assert name not in build(facts=small, environ={name: "1"}).env
    assert name not in build(facts=replace(small, shared_memory_bytes=1 << 30)).env
    assert name not in build(facts=replace(CUDA, shared_memory_bytes=64 << 20)).env


def test_what_the_user_says_about_the_cpu_wins():
    command = build(
        "--block_size=64", "--no-enforce-eager", "--kv-cache-memory-bytes", "9", "--max-num-batched-tokens=7",
        facts=CPU,
        environ={"VLLM_CPU_OMP_THREADS_BIND": "auto", "OMP_WAIT_POLICY": "ACTIVE"},
    )  # fmt: skip
    assert "--block-size" not in command.argv
    assert "--enforce-eager" not in command.argv
    assert "--max-num-batched-tokens" not in command.argv
    assert set(command.env) == {"VLLM_PLUGINS"}


def test_a_generated_model_gets_its_name_and_tools_by_default():
    local = {"model": "tiny", "model_path": "/cache/tiny", "chat_template": "/t.jinja"}
    command = build(**local)
    assert value(command, "--served-model-name") == "tiny"
    assert value(command, "--chat-template") == "/t.jinja"
    assert value(command, "--tool-call-parser") == "hermes"
    assert "--enable-auto-tool-choice" in command.argv
    assert json.loads(value(command, "--additional-config"))["sojourn"]["tool_call_parser"] == "hermes"
    named = build("--served-model-name", "me", "--chat_template", "x", **local)
    assert value(named, "--served-model-name") == "me"
    assert "/t.jinja" not in named.argv


def test_the_engine_core_is_told_the_servers_tool_parser():
    command = build("--tool-call-parser", "mistral", "--tool-parser-plugin=p.py")
    own = json.loads(value(command, "--additional-config"))["sojourn"]
    assert (own["tool_call_parser"], own["tool_parser_plugin"]) == ("mistral", "p.py")
    assert "--tool-call-parser" in command.argv
    given = build("--tool-call-parser", "mistral", extra={"tool_call_parser": "hermes"})
    assert json.loads(value(given, "--additional-config"))["sojourn"]["tool_call_parser"] == "hermes"


def test_the_dry_run_line_is_what_a_shell_reads_back():
    command = build("--additional-config", '{"a b": "it\'s"}', environ={"PYTHONDONTWRITEBYTECODE": "1"})
    parts = shlex.split(command.as_shell())
    assert parts[:4] == ["env", "-u", "PYTHONDONTWRITEBYTECODE", "VLLM_PLUGINS=sojourn"]
    assert tuple(parts[4:]) == command.argv


@pytest.mark.parametrize(
    "flags",
    [
        "--api-key sk-1", "--api-key sk-1 sk-2", "--api_key=sk-1", "--api-k sk-1", "--hf-token sk-1",
        "--hf-token=sk-1", "--otlp-traces-endpoint http://me:sk-1@host/x",
        "--otlp-traces-endpoint=http://sk-1@host/x",
    ],
)  # fmt: skip
def test_secrets_are_given_to_the_engine_and_not_shown(flags):
    args = tuple(flags.split())
    command = build(*args, "--seed", "4")
    assert command.argv[-len(args) - 2 :] == (*args, "--seed", "4")
    shown = command.as_shell()
    assert "sk-" not in shown
    assert "***" in shown
    assert shown.endswith("--seed 4")


@pytest.mark.parametrize(
    ("facts", "policy", "said"),
    [(CUDA, "continuum", "no coding agents"), (CPU, "continuum", None), (CUDA, "stock", None)],
)
def test_vllms_server_in_rust_has_nothing_of_ours_and_one_line_says_so(facts, policy, said):
    for value in ("1", "0"):
        warnings = build(policy=policy, facts=facts, environ={"VLLM_USE_RUST_FRONTEND": value}).warnings
        assert len(warnings) == (value == "1" and said is not None)
        assert all(said in line for line in warnings)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), ("", 8000)),
        (("--port", "1", "--port=90", "--host", "::1"), ("::1", 90)),
        (("--uds", "/s", "--port", "1"), None),
    ],
)
def test_where_it_will_listen(args, expected):
    assert listen_address(EngineFlags.read(args)) == expected
    with pytest.raises(InvalidOption, match="--port 70000 is not a port number"):
        listen_address(EngineFlags.read(("--port", "70000")))


# -- a --config file; ``tests/vllm`` compares how it is read with vLLM ---------------------------


def test_the_command_line_shows_no_value_of_the_file(tmp_path):
    command = build("--config", write(tmp_path, "api-key: secret\n"), facts=CPU)
    assert "secret" not in " ".join(command.argv)
    assert command.flags.value("--api-key") == "secret"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("f.yaml", b"", " is empty; expected flag: value"),
        ("f.yaml", b"port", " is a str; expected flag: value"),
        ("f.yaml", b"- port", " is a list; expected"),
        ("f.yaml", b"port: [", " is not YAML: .* line 1"),
        ("f.yaml", b"a: \x00", " is not YAML"),
        ("f.yaml", b"a: \xe9\n", " is not YAML"),
        ("missing.yml", None, ": cannot read the file: No such file"),
        ("f.json", b"{}", ": expected a file named .yaml"),
        ("", None, ": expected a file named .yaml"),
    ],
)
def test_an_unusable_file_is_named(tmp_path, name, content, message):
    pytest.importorskip("yaml")
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidOption, match=f"--config {file}{message}"):
        EngineFlags.read(("--config", str(file)))
