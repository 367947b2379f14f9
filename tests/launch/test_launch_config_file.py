"""A ``--config`` file counts like flags on the command line; no vLLM needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.launch.engine_flags import EngineFlags, InvalidOption, read_config_file
from sojourn_server.launch.serve_command import EngineCommand, LaunchEnvironment, ServeOptions, build_command

pytest.importorskip("yaml")

CPU = LaunchEnvironment(python="/py", cpu_build=True, has_vllm_cli=False, cpus=(0, 1))


def write(folder: Path, text: str, name: str = "f.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def build(*args: str, **options: Any) -> EngineCommand:
    options = {"policy": "continuum", **options}
    return build_command(ServeOptions(model="m", model_path="m", engine_args=args, **options), CPU, {})


def test_keys_become_flags(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "port: 1\nseed: null\na_b: x\nc: [d, 2]\ne: []\nf: {g: true}\nh: true\ni: false\nno-j: false\n",
    )
    assert read_config_file(file) == (
        "--port=1", "--seed=None", "--a_b=x", "--c", "d", "2", '--f={"g": true}', "--h", "--no-i",
    )  # fmt: skip


def test_the_files_additional_config_is_kept(tmp_path: Path) -> None:
    given = {"other": {"a": 1}, "sojourn": {"queue_patience_s": 5}}
    for text in (json.dumps({"additional-config": given}), f"additional_config: '{json.dumps(given)}'"):
        command = build("--config", write(tmp_path, text))
        assert json.loads(command.flags.value("--additional-config") or "") == {
            "other": {"a": 1},
            "sojourn": {"queue_patience_s": 5, "policy": "continuum"},
        }
    with pytest.raises(InvalidOption, match="as one JSON object"):
        build("--config", write(tmp_path, "additional-config.other: 1\n"))


def test_the_command_line_shows_no_value_of_the_file(tmp_path: Path) -> None:
    command = build("--config", write(tmp_path, "api-key: secret\n"))
    assert "secret" not in " ".join(command.argv)
    assert command.flags.value("--api-key") == "secret"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; expected flag: value"),
        ("port", "is a str; expected flag: value"),
        ("- port", "is a list; expected"),
        ("port: [", "is not YAML, .* line 1"),
        ("a: \x00", "is not YAML"),
        ("1: 2", "1 is no flag's name"),
        ("config: g.yaml", "names another config file"),
        ("a: {b: 2020-01-01}", "is not YAML, or not as JSON: Object of type date"),
        ("a: &a {b: *a}", "is not YAML, or not as JSON: Circular"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(InvalidOption, match=f"--config {file}:? {message}"):
        EngineFlags.read(("--config", file))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = str(tmp_path / "missing.yml")
    with pytest.raises(InvalidOption, match=f"{file}: cannot read the file: No such file"):
        EngineFlags.read(("--config", file))
    for folder in (f"{tmp_path}/x.json", str(tmp_path)):
        with pytest.raises(InvalidOption, match=f"{folder}: expected a file named .yaml"):
            EngineFlags.read(("--config", folder))
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(InvalidOption, match=r"latin\.yaml is not YAML"):
        EngineFlags.read(("--config", str(tmp_path / "latin.yaml")))
