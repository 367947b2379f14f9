from __future__ import annotations

import json
import shlex
import socket
import sys
from functools import partial
from pathlib import Path

import cli_process
import pytest
from sojourn_server.cli import console
from sojourn_server.cli import serve as serve_command
from sojourn_server.launch.engine_server import free_port
from sojourn_server.launch.weights_fingerprint import known_weights
from sojourn_server.policies.costs.engine_profile import EngineProfile, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.policies.preset import preset_names
from sojourn_server.vllm import compat

pytestmark = pytest.mark.usefixtures("tested_engine")


invoke = partial(cli_process.invoke, "serve")
failure = partial(cli_process.refused, "serve")


def dry_run(*args) -> list[str]:
    result = invoke(*args, "--dry-run")
    assert result.exit_code == 0, result.exception
    return shlex.split(result.stdout)


def settings_of(parts: list[str]) -> dict[str, object]:
    """The settings in a command of the engine."""
    return json.loads(parts[parts.index("--additional-config") + 1])["sojourn"]


def test_dry_run_prints_the_command_and_makes_nothing(tmp_path):
    options = ["--sojourn-option", "max_programs=3", "--sojourn-option", "recording_file=x"]
    parts = dry_run("tiny", "--port", "8123", "-tp", "2", *options)
    assert parts[parts.index("--port") :][:4] == ["--port", "8123", "-tp", "2"]
    given = {"max_programs": 3, "recording_file": "x"}
    assert settings_of(parts) == {"tool_call_parser": "hermes", "policy": "sojourn", **given}
    assert str(tmp_path / "cache" / "tiny-1") in parts
    assert not (tmp_path / "cache").exists()


def test_with_a_disk_sliding_layers_are_noted_and_states_are_refused(tmp_path):
    config, model = tmp_path / "config.json", str(tmp_path)
    tiers = ("--kv-host-gib", "1", "--kv-disk", str(tmp_path / "kv"), "--kv-disk-gib", "1")
    host = tiers[:2]
    config.write_text(json.dumps({"layer_types": ["sliding_attention", "full_attention"]}))
    assert "attend to a window" in " ".join(invoke(model, *tiers, "--dry-run").output.split())
    for other in ((), host):
        assert "window" not in invoke(model, *other, "--dry-run").output
    config.write_text(json.dumps({"layer_types": ["linear_attention", "full_attention"]}))
    told = failure(model, *tiers, "--dry-run")
    assert "layers that keep a state" in str(told)
    assert "--tier-backend auto" in told.next_step
    assert '"kv_connector": "ProgramOffloadingConnector"' in " ".join(dry_run(model, *host))
    assert dry_run(model)
    assert dry_run(model, "--kv-offloading-size", "1")


def test_every_shipped_preset_is_a_policy():
    assert "continuum" in preset_names()
    for policy in ("stock", *preset_names()):
        tiers = [] if policy == "stock" else ["--kv-host-gib", "0.001"]  # mori needs them
        dry_run("tiny", "--policy", policy, *tiers)


@pytest.mark.parametrize(
    "given",
    [
        ("--sojourn-option=policy=tetris-learned",),
        ("--additional-config", '{"sojourn": {"policy": "tetris-learned"}}'),
    ],
)
def test_a_policy_among_the_settings_counts_as_its_flag(given, nothing_starts):
    parts = dry_run("tiny", *given)
    assert settings_of(parts)["policy"] == "tetris-learned"
    assert "--worker-cls" in parts, "as the policy needs to read hidden states"
    assert dry_run("tiny", "--policy", "tetris-learned", *given) == parts
    assert settings_of(dry_run("tiny", "--policy", "saga", *given))["policy"] == "saga", (
        "the flag counts first"
    )


def test_files_become_absolute_and_must_be_readable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text('extends = "continuum"\nname = "p"\n')
    line = " ".join(dry_run("tiny", "--policy-file", "p.toml", "--sojourn-history", "h.json"))
    assert f'"policy_file": "{tmp_path}/p.toml"' in line
    assert f'"history_file": "{tmp_path}/h.json"' in line
    assert "q.toml" in failure("tiny", "--policy-file", "q.toml").message
    Path("profile.toml").write_text("prefill = 3\n")
    assert "profile.toml" in failure("tiny", "--sojourn-profile", "profile.toml", "--dry-run").message


MORI = ("tiny", "--policy", "mori", "--kv-host-gib", "0.001", "--dry-run")
DISK = ("--kv-host-gib=1", "--kv-disk=/d", "--kv-disk-gib=1")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--port", "1", "tiny"), "expected a model, got"),
        (("./nowhere",), "not a directory"),
        (("tiny", "--policy", "stokc"), "unknown policy 'stokc'; did you mean 'stock'?"),
        (("tiny", "--sojourn-option", "x"), "not key=value"),
        (("tiny", "--sojourn-lease-budget", "2"), "lease_budget_fraction is 2.0; expected `float` <= 1.0"),
        (("tiny", "--port", "none", "--dry-run"), "not a port"),
        (("tiny", "--session-header", "X Run", "--dry-run"), "is 'X Run'; expected `str` matching"),
        (("tiny", *DISK, "--enable-lora"), "is identified by the adapter's name and not by its weights"),
        ((*MORI, "--sojourn-option", "hold_timeout=3"), "did you mean 'hold_timeout_s'?"),
        (
            (*MORI, "--scheduling-policy", "priority"),
            "expected --scheduling-policy fcfs, or a policy without",
        ),
    ],
)
def test_mistakes_are_explained_before_anything_starts(args, said):
    error = failure(*args)
    assert said in error.message
    assert error.next_step


def test_a_model_near_to_tiny_is_noted_and_a_hub_id_is_not():
    said = "note: tinny is taken for a hub id; did you mean 'tiny'?"
    assert said in invoke("tinny", "--dry-run").stderr
    assert "did you mean" not in invoke("acme/tinny", "--dry-run").stderr


def test_a_vllm_that_is_missing_or_untested_is_refused_but_for_stock(monkeypatch, tmp_path):
    monkeypatch.setattr(compat, "installed_vllm", lambda: None)
    assert "make setup" in failure("tiny").next_step
    monkeypatch.setattr(compat, "installed_vllm", lambda: "9.9.9")
    error = failure("tiny", "--dry-run")
    assert "9.9.9" in error.message
    assert compat.TESTED_VLLM[-1] in error.message
    assert "stock" in error.next_step
    dry_run("tiny", "--policy", "stock")
    # The connector of a pair is ours, though the scheduler be stock.
    assert "9.9.9" in failure("tiny", *member(tmp_path), "--policy", "stock", "--dry-run").message


def test_a_port_in_use_fails_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_command, "make_model", lambda model: pytest.fail("loaded"))
    monkeypatch.setattr(serve_command.os, "execve", lambda *a: pytest.fail("started"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        pair = [*member(tmp_path), "--kv-listen", f"tcp:127.0.0.1:{port}", "--port", "0"]
        for flags, named in (["--port", port], "--port"), (pair, "--kv-listen"):
            error = failure("tiny", "--host", "127.0.0.1", *flags)
            assert port in error.message
            assert named in error.next_step


def test_the_process_becomes_the_engine_and_keys_are_shown_nowhere(monkeypatch):
    key = ["--api-key", "sk-1", "--hf-token=sk-2"]
    assert "sk-" not in invoke("tiny", *key, "--dry-run").output
    became = []
    monkeypatch.setattr(serve_command, "make_model", became.append)
    monkeypatch.setattr(serve_command.os, "execve", lambda *call: became.extend(call))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with console.console.capture() as said:
        result = invoke("tiny", "--host", "127.0.0.1", "--port", str(free_port("127.0.0.1")), *key)
    assert result.exit_code == 0, result.exception
    made, path, argv, env = became
    assert (made, argv[0]) == ("tiny", path)
    assert {"sk-1", "--hf-token=sk-2"} <= set(argv)
    assert "PYTHONDONTWRITEBYTECODE" not in env
    assert "sojourn" in env["VLLM_PLUGINS"].split(",")
    assert "--api-key" in said.get()
    assert "sk-" not in said.get()


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setattr(serve_command, "make_model", lambda model: None)
    monkeypatch.setattr(serve_command, "check_free_port", lambda *args: None)
    monkeypatch.setattr(serve_command.os, "execve", lambda *a: pytest.fail("started"))


def tiers(disk, host_gib="0.001"):
    return ["--kv-disk", str(disk), "--kv-disk-gib", "0.001", "--kv-host-gib", host_gib]


@pytest.mark.parametrize("options", [tiers("file"), ("--sojourn-history", "file/h")])
def test_a_path_that_cannot_be_fails_before_anything_is_loaded(
    tmp_path, nothing_starts, monkeypatch, options
):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    error = failure("tiny", *options)
    assert f"{tmp_path}/file cannot be used: Not a directory" in error.message
    assert error.next_step == f"give {options[0]} a path that this user can write"
    assert error.exit_code == 2


def test_a_dry_run_checks_the_tiers_too_prints_the_command_and_makes_nothing(tmp_path, nothing_starts):
    there = tmp_path / "kv"
    assert "--kv-transfer-config" in dry_run("tiny", *tiers(there / "new"))
    assert not there.exists()
    (tmp_path / "file").write_text("")
    for options, message in (
        (tiers(tmp_path / "file"), "Not a directory"),
        (tiers(there, host_gib="1e7"), "--kv-host-gib is 1e+07"),
    ):
        result = invoke("tiny", *options, "--dry-run")
        assert message in str(result.exception)
        assert result.exception.exit_code == 2
        assert "the command above is for a machine that passes this check" in result.exception.next_step
        error = failure("tiny", *options)
        assert message in error.message
        assert "the command above" not in error.next_step
        assert "--kv-transfer-config" in shlex.split(result.stdout), "it may be for another machine"


def test_what_is_known_of_a_store_comes_of_the_command(tmp_path, nothing_starts, monkeypatch):
    model = tmp_path / "[model]"
    model.mkdir()
    (model / "config.json").write_text("{}")
    known = {
        "model": f"{known_weights(str(model))} torch.float32",
        "vllm_version": compat.TESTED_VLLM[-1],
        "block_tokens": 32,
    }
    store = tmp_path / "kv" / "0123456789abcdef"
    store.mkdir(parents=True)

    def lies_there(**changed):
        manifest = {"kind": "sojourn KV store", "format": 1, **known, **changed}
        (store / "manifest.json").write_text(json.dumps(manifest))

    lies_there(vllm_version="0.1")
    assert "vllm_version: found '0.1'" in failure(str(model), *tiers(tmp_path / "kv")).message
    lies_there(model="other")
    assert "model: found 'other'" in failure(str(model), *tiers(tmp_path / "kv")).message
    lies_there()
    became = []
    monkeypatch.setattr(serve_command.os, "execve", lambda path, argv, env: became.append(argv))
    invoke(str(model), *tiers(tmp_path / "kv"))
    assert len(became) == 1


@pytest.mark.parametrize(
    ("named", "flags"),
    [
        ("LMCacheConnectorV1", ["--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1"}']),
        ("NixlConnector", ["--kv-transfer-config.kv_connector", "NixlConnector"]),
        ("OffloadingConnector", ["--kv-offloading-size", "8"]),
        ("host memory", []),
    ],
)
def test_a_policy_that_places_programs_is_refused_without_our_host_memory(named, flags):
    options = ["tiny", "--policy", "mori", "--dry-run", *flags]
    error = failure(*options)
    assert named in error.message
    assert "--kv-host-gib" in error.message
    assert "allow_missing_tiers=true" in error.message
    said = invoke(*options, "--sojourn-option", "allow_missing_tiers=true").output
    assert "policy mori: off: placement, because" in said.replace("\n", " ")


# -- engines of a pair -------------------------------------------------------------------


def member(store, role="prefill"):
    return ["--role", role, "--kv-store", str(store), "--kv-buffer-gib", "0.001"]


def test_a_role_installs_the_paths_and_only_prefill_engines_keep_contexts(tmp_path, nothing_starts):
    for role, policy in (("decode", "observe"), ("prefill", "sojourn")):
        parts = dry_run("tiny", *member(tmp_path, role=role), "--port", "8123")
        assert settings_of(parts)["policy"] == policy
    assert f'"node": "{socket.gethostname()}"' in " ".join(parts)
    assert list(tmp_path.iterdir()) == []
    error = failure("tiny", *member(tmp_path / "nowhere"))
    assert "does not exist; expected the directory" in error.message
    assert error.next_step


# -- --config FILE -------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("yaml")
    monkeypatch.setattr(serve_command.os, "execve", lambda *a: pytest.fail("started"))
    return tmp_path / "engine.yaml"


def test_the_file_may_name_the_model(file: Path) -> None:
    file.write_text("model: org/of-the-file\n")
    for args in (["--config", str(file)], [f"--config={file}"], ["--seed", "4", "--config", str(file)]):
        parts = dry_run("--policy", "continuum", *args)
        assert parts.count("org/of-the-file") == 1
        assert parts[-2:] == ["--config", str(file)]
    assert "org/of-the-file" not in dry_run("org/first", "--config", str(file))
    file.write_text("port: 8123\n")
    assert "expected a model" in failure("--config", str(file)).message
    assert "expected a model" in failure("--seed", "4").message


def test_a_policy_of_the_file_counts(file: Path) -> None:
    file.write_text("additional-config: {sojourn: {policy: mori, max_programs: 5}}\n")
    assert "policy mori places programs" in str(failure("org/name", "--config", str(file)))
    parts = dry_run("org/name", "--kv-host-gib", "0.001", "--config", str(file))
    assert settings_of(parts).items() >= {"policy": "mori", "max_programs": 5}.items()


@pytest.mark.parametrize("text", ["kv-host-gib: 1", "kv_host_gib: 1"])
def test_a_file_that_is_not_vllms_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    assert "--kv-host-gib is a flag of sojourn" in failure("org/name", "--config", str(file)).message


# -- --compute-quota-s ----------------------------------------------------------------------


def test_a_quota_is_a_setting_that_is_checked_with_its_profile_before_the_engine_starts(
    tmp_path: Path,
) -> None:
    curve, steps = PrefillCurve(0.0, 1e-4, 0.0), StepCosts(0.01, 1e-4, 1e-9, 0.0, 0.0)
    profile = EngineProfile("m", "h", "e", block_size=16, prefill=curve, points=(), steps=steps)
    path = tmp_path / "profile.toml"
    path.write_text(profile.to_toml())
    options = ("tiny", "--compute-quota-s", "0.3", "--sojourn-profile", str(path))
    assert settings_of(dry_run(*options))["compute_quota_s"] == 0.3
    assert "compute_quota_s" not in settings_of(dry_run("tiny"))
    assert "expected chunked prefill" in failure(*options, "--no-enable-chunked-prefill").message


def test_without_yaml_the_package_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("port: 8123\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    error = failure("org/name", "--dry-run", "--config", str(file))
    assert (error.message, error.next_step) == (
        f"--config {file} needs PyYAML, as vLLM does",
        "pip install pyyaml",
    )
