"""What ships: the wheel and the source archive, release notes, the workflow that would publish them."""

from __future__ import annotations

import email
import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import msgspec
import pytest
from script_modules import load_script
from sojourn_server.api.web_page import FOLDER

ROOT = Path(__file__).parents[2]


def build(root: Path, kind: str, into: Path, epoch: str = "1700000000") -> Path:
    """Build a ``wheel`` or ``sdist`` of the sources at ``root`` without isolation; return its path."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", into],
        cwd=root, env={**os.environ, "SOURCE_DATE_EPOCH": epoch},
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    [built] = [path for path in into.iterdir() if path.suffix == {"wheel": ".whl", "sdist": ".gz"}[kind]]
    return built


def digest(built: Path) -> str:
    """A hash of the file's bytes. pytest takes minutes to show how two files differ."""
    return hashlib.sha256(built.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.mark.nightly
def test_a_wheel_from_the_source_archive_has_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    """The archive is complete, and neither the folder nor the times of its files reach the wheel."""
    archive = build(ROOT, "sdist", tmp_path / "first")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.glob("sojourn-*")
    assert digest(build(unpacked, "wheel", tmp_path / "wheel")) == digest(wheel)
    assert digest(build(ROOT, "sdist", tmp_path / "second")) == digest(archive)


@pytest.mark.nightly
def test_the_wheel_has_its_licence_its_types_and_the_engines_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        [info] = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = email.message_from_bytes(files.read(f"{info}/METADATA"))
        entry_points = files.read(f"{info}/entry_points.txt").decode()
        licence = files.read(f"{info}/licenses/LICENSE")
        page = {
            path.relative_to(FOLDER).as_posix(): files.read(
                f"sojourn_server/api/page/{path.relative_to(FOLDER)}"
            )
            for path in FOLDER.rglob("*.*")
        }
    packages = {"sojourn", "sojourn_integrations", "sojourn_server"}
    assert {name.partition("/")[0] for name in names} == {*packages, info}
    assert {f"{package}/py.typed" for package in packages} <= names
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert page == {name: (FOLDER / name).read_bytes() for name in page}
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT", "MIT: uPlot in the web page"
    assert metadata.get_all("License-File") == [
        "LICENSE", "server_ext/sojourn_server/api/page/vendor/uPlot.LICENSE",
    ]  # fmt: skip
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_all("Project-URL") is None, "the project has no public address yet"
    for group in ("console_scripts", "vllm.general_plugins", "vllm.endpoint_plugins"):
        assert f"[{group}]\nsojourn = " in entry_points


@pytest.mark.nightly
def test_the_installed_sdk_works_alone(wheel: Path, tmp_path: Path) -> None:
    """In an environment with msgspec and nothing else, which pip fills without an index."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "clean"], check=True, timeout=60
    )
    clean = tmp_path / "clean"
    python = clean / "bin" / "python"
    installed = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install",
         "--no-index", "--no-deps", "--no-compile", wheel],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert installed.returncode == 0, installed.stderr
    [site] = (clean / "lib").glob("python*/site-packages")
    (site / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    check = [python, "-I", "-W", "error", ROOT / "scripts" / "check_installed_sdk.py"]
    checked = subprocess.run(check, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "works alone" in checked.stdout


def test_one_version_is_declared_and_the_changelog_has_it() -> None:
    script = load_script("scripts/release_notes.py")
    [version] = set(script.declared_versions().values())
    assert script.release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version, draft=True)


def test_release_notes_are_one_versions_part_and_need_a_date() -> None:
    script = load_script("scripts/release_notes.py")
    log = "# Changelog\n\n## [0.2.0] - soon\n\n- new\n\n## [0.1.0] - 2026-12-01\n\n- first\n"
    assert script.release_notes(log, "0.1.0") == "- first\n"
    assert script.release_notes(log, "0.2.0", draft=True) == "- new\n"
    with pytest.raises(script.ReleaseError, match=r"dates 0\.2\.0 'soon'; a release needs YYYY-MM-DD"):
        script.release_notes(log, "0.2.0")
    with pytest.raises(script.ReleaseError, match=r"no head '## \[0\.3\.0\]"):
        script.release_notes(log, "0.3.0")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["release.yml", "nightly.yml"])
def test_the_workflow_keeps_to_its_schema_and_stores_no_secret(name: str) -> None:
    path = ROOT / ".github" / "workflows" / name
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", path]
    checked = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout
    text = path.read_text(encoding="utf-8")
    assert ("id-token: write" in text) is (name == "release.yml")
    assert "secrets." not in text
