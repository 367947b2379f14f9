"""A preset file may name a class beside it; nothing else may have anything imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sojourn_server.policies.preset import PresetError, parse_preset, read_preset
from sojourn_server.policies.preset_store import custom_class_loader
from sojourn_server.vllm.plugin_settings import PluginSettings

BASE = 'extends = "continuum"\n'
MINE = '''
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True, slots=True)
class Patient:
    """Every program waits."""
    seconds: float = 1.0
    is_used = True
    reserves_prompt_blocks = False
    forecasts = False

    def __post_init__(self):
        if self.seconds < 0:
            raise ValueError(f"seconds is {self.seconds}; expected ≥ 0")

    def may_admit(self, entry, now):
        return now > self.seconds

class Half:
    is_used = True

other = 3
'''


def preset(folder: Path, text: str, module: str = MINE, name: str = "mine") -> Path:
    (folder / f"{name}.py").write_text(module)
    path = folder / "own.toml"
    path.write_text(BASE + text)
    return path


def test_a_class_beside_the_file_is_used_with_its_options(tmp_path: Path) -> None:
    path = preset(tmp_path, 'admission = { policy = "mine:Patient", seconds = 7.0 }')
    entry = read_preset(path).admission
    assert entry.seconds == 7.0
    assert (entry.may_admit(None, 6.0), entry.may_admit(None, 8.0)) == (False, True)
    assert type(read_preset(path).admission) is type(entry), "the module is loaded once"
    assert PluginSettings.read({"sojourn": {"policy_file": str(path)}}).preset().admission == entry
    # It shadows no other import.
    assert "mine" not in sys.modules
    files = {name: str(getattr(module, "__file__", None)) for name, module in sys.modules.items()}
    here = [name for name, file in files.items() if file.startswith(str(tmp_path))]
    assert [name.partition("_own_")[0] for name in here] == ["sojourn"]


@pytest.mark.parametrize("allowed", ["sojourn_server", "other, sojourn_server.policies"])
def test_an_installed_module_that_is_allowed_does_too(allowed: str) -> None:
    place = "sojourn_server.policies.retention_policies:FixedRetention"
    text = f'{BASE}retention = {{ policy = "{place}", ttl_s = 3.0 }}'
    own = custom_class_loader(Path("/nowhere"), allowed)
    assert parse_preset(text, source="t", own=own).retention.ttl_s == 3.0
    for other in ("", "sojourn_serve", "sojourn_server.policies.placement"):
        with pytest.raises(PresetError, match="--allow-policy-modules sojourn_server"):
            parse_preset(text, source="t", own=custom_class_loader(Path("/nowhere"), other))


@pytest.mark.parametrize("allowed", ["", "subprocess"])
def test_a_preset_file_alone_runs_no_command(tmp_path: Path, allowed: str) -> None:
    """A file named subprocess.Popen and its arguments, and the command ran."""
    made = tmp_path / "made"
    path = preset(tmp_path, f'retention = {{ policy = "subprocess:Popen", args = ["touch", "{made}"] }}')
    with pytest.raises(PresetError, match="subprocess is a module of Python's standard library"):
        read_preset(path, allowed_modules=allowed)
    assert not made.exists()


def test_a_refused_module_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "never_imported.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    path = preset(tmp_path, 'admission = "never_imported:Patient"')
    with pytest.raises(PresetError, match="--allow-policy-modules never_imported"):
        read_preset(path)
    path = preset(tmp_path, 'admission = "antigravity:Patient"')
    with pytest.raises(PresetError, match="standard library"):
        read_preset(path, allowed_modules="antigravity")
    assert "antigravity" not in sys.modules


def test_a_class_without_the_methods_is_not_instantiated(tmp_path: Path) -> None:
    for body in ("pass", "may_admit = is_used = reserves_prompt_blocks = forecasts = True"):
        folder = tmp_path / str(len(body))
        folder.mkdir()
        module = f"class Command:\n    def __init__(self, **options): raise SystemExit('ran')\n    {body}\n"
        with pytest.raises(PresetError, match="may_admit"):
            read_preset(preset(folder, 'admission = { policy = "mine:Command", args = "x" }', module))


@pytest.mark.parametrize("name", ["../mine", "folder/mine", "{absolute}", "", ".mine", "mi\\u0000ne"])
def test_a_module_lies_beside_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.py").write_text(MINE)
    path = preset(tmp_path, "")
    (tmp_path / "folder" / "own.toml").write_text(
        f'{BASE}admission = "{name.format(absolute=tmp_path / "mine")}:Patient"'
    )
    with pytest.raises(PresetError, match="is not the name of a module"):
        read_preset(path.parent / "folder" / "own.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('admission = "mine:Patent"', r"mine\.py has no class 'Patent'; did you mean 'Patient'\?"),
        ('admission = "mine:other"', r"mine\.py has no class 'other'"),
        ('admission = "yours:Patient"', r"there is no .*yours\.py, and installed modules are"),
        (
            'admission = "mine:Half"',
            r"has no may_admit and no reserves_prompt_blocks and no forecasts; "
            r"admission needs what AdmissionPolicy in",
        ),
        ('lease_reclaim = "mine:Patient"', r"lease_reclaim: mine:Patient has no release"),
        (
            'admission = { policy = "mine:Patient", seconds = -1.0 }',
            r"admission: seconds is -1\.0; expected ≥ 0",
        ),
        ('admission = { policy = "mine:Patient", second = 1.0 }', r"unexpected keyword argument 'second'"),
        ('admission = "every1"', r"unknown admission policy 'every1'; .*did you mean 'everyone'\?"),
    ],
)
def test_errors_are_reported_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = preset(tmp_path, text)
    with pytest.raises(PresetError, match=message) as raised:
        read_preset(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_module_that_cannot_be_loaded_is_reported_and_not_cached(tmp_path: Path) -> None:
    path = preset(tmp_path, 'admission = "mine:Patient"', "import not_there_at_all")
    for _ in range(2):
        with pytest.raises(PresetError, match="cannot be imported: No module named 'not_there_at_all'"):
            read_preset(path)
    (tmp_path / "mine.py").write_text("1 / 0")
    with pytest.raises(PresetError, match="cannot be imported: ZeroDivisionError: division by zero"):
        read_preset(path)
    (tmp_path / "mine.py").write_text(MINE)
    assert read_preset(path).admission.seconds == 1.0
    with pytest.raises(PresetError, match="No such file"):
        read_preset(tmp_path / "none.toml")


def test_text_from_elsewhere_has_nothing_imported(tmp_path: Path) -> None:
    path = preset(tmp_path, 'admission = "mine:Patient"', "raise SystemExit")
    with pytest.raises(PresetError, match="only in a file named by --policy-file"):
        parse_preset(path.read_text(), source=str(path))
