"""A preset file may name a class beside it; nothing else may have anything imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sojourn_server.policies.custom_policies import custom_class_loader
from sojourn_server.policies.preset import (
    POLICY_CLASSES,
    POLICY_PROTOCOLS,
    PresetError,
    parse_preset,
    read_preset,
)
from sojourn_server.vllm.plugin_settings import PluginSettings

BASE = 'extends = "continuum"\n'
MINE = '''
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True, slots=True)
class Patient:
    """Every program waits."""
    seconds: float = 1.0
    gates = True
    reserves_prompt_blocks = False
    forecasts = False

    def __post_init__(self):
        if self.seconds < 0:
            raise ValueError(f"seconds is {self.seconds}; expected ≥ 0")

    def may_admit(self, entry, now):
        return now > self.seconds

class Half:
    gates = True

other = 3
'''


def preset(folder: Path, text: str, module: str = MINE, name: str = "mine") -> Path:
    (folder / f"{name}.py").write_text(module)
    path = folder / "own.toml"
    path.write_text(BASE + text)
    return path


def _file(module: object) -> str:
    return str(getattr(module, "__file__", None) or "")


def test_a_class_beside_the_file_is_used_with_its_options(tmp_path: Path) -> None:
    path = preset(tmp_path, 'entry = { policy = "mine:Patient", seconds = 7.0 }')
    entry = read_preset(path).entry
    assert entry.seconds == 7.0
    assert (entry.may_admit(None, 6.0), entry.may_admit(None, 8.0)) == (False, True)
    assert type(read_preset(path).entry) is type(entry), "the module is loaded once"
    assert PluginSettings.read({"sojourn": {"policy_file": str(path)}}).preset().entry == entry
    # It shadows no other import.
    assert "mine" not in sys.modules
    here = [name for name, module in sys.modules.items() if _file(module).startswith(str(tmp_path))]
    assert [name.partition("_own_")[0] for name in here] == ["sojourn"]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    found = []
    for seconds in (1, 2):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        module = MINE.replace("seconds: float = 1.0", f"seconds: float = {seconds}.0")
        found.append(read_preset(preset(folder, 'entry = "random:Patient"', module, "random")).entry.seconds)
    assert found == [1.0, 2.0]


def test_an_installed_module_does_too() -> None:
    place = "sojourn_server.policies.retention.retention_policies:FixedRetention"
    preset = parse_preset(
        f'{BASE}retention = {{ policy = "{place}", ttl_s = 3.0 }}',
        source="t",
        own=custom_class_loader(Path("/nowhere")),
    )
    assert preset.retention.ttl_s == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('entry = "mine:Patent"', r"mine\.py has no class 'Patent'; did you mean 'Patient'\?"),
        ('entry = "mine:other"', r"mine\.py has no class 'other'"),
        ('entry = "yours:Patient"', r"there is neither .*yours\.py nor an installed yours"),
        (
            'entry = "mine:Half"',
            r"has no reserves_prompt_blocks and no forecasts and no may_admit; "
            r"entry needs what AdmissionPolicy in",
        ),
        ('room = "mine:Patient"', r"room: mine:Patient has no release"),
        ('entry = { policy = "mine:Patient", seconds = -1.0 }', r"entry: seconds is -1\.0; expected ≥ 0"),
        ('entry = { policy = "mine:Patient", second = 1.0 }', r"unexpected keyword argument 'second'"),
        ('entry = "every1"', r"unknown entry policy 'every1'; .*did you mean 'everyone'\?"),
    ],
)
def test_errors_are_reported_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = preset(tmp_path, text)
    with pytest.raises(PresetError, match=message) as raised:
        read_preset(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_module_that_cannot_be_loaded_is_reported_and_not_cached(tmp_path: Path) -> None:
    path = preset(tmp_path, 'entry = "mine:Patient"', "import not_there_at_all")
    for _ in range(2):
        with pytest.raises(PresetError, match="cannot be imported: No module named 'not_there_at_all'"):
            read_preset(path)
    (tmp_path / "mine.py").write_text("1 / 0")
    with pytest.raises(PresetError, match="cannot be imported: ZeroDivisionError: division by zero"):
        read_preset(path)
    (tmp_path / "mine.py").write_text(MINE)
    assert read_preset(path).entry.seconds == 1.0


def test_text_from_elsewhere_has_nothing_imported(tmp_path: Path) -> None:
    path = preset(tmp_path, 'entry = "mine:Patient"', "raise SystemExit")
    with pytest.raises(PresetError, match="only in a file named by --policy-file"):
        parse_preset(path.read_text(), source=str(path))


def test_every_question_says_what_it_needs() -> None:
    assert POLICY_PROTOCOLS.keys() == POLICY_CLASSES.keys()
