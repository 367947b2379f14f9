"""benchmarks/gpu/kit.py without a GPU: it runs, needs torch alone, and notices a wrong byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
KIT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "kit.py"


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import runpy, sys\nsys.argv = ['kit.py', *{list(arguments)!r}]\n{before}\n"
    code += f"try:\n    runpy.run_path({str(KIT)!r}, run_name='__main__')\nfinally:\n"
    code += "    print('loaded:', [n for n in ('msgspec', 'rich', 'vllm', 'pydantic') if n in sys.modules])\n"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )


def test_it_runs_on_the_cpu_and_needs_no_package_but_torch(tmp_path: Path) -> None:
    result = run("--small", "--steps", "300", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "loaded: []" in result.stdout
    document = json.loads((tmp_path / "gpu_kit_small.json").read_text())
    assert "failed" not in document
    assert [row["wrong"] for row in document["order"]["layouts"]] == [0] * 6
    assert sum(row["steps"] for row in document["order"]["layouts"]) == 300
    page = (tmp_path / "gpu_kit_small.md").read_text()
    assert "shows that the kit runs, the figures mean nothing" in page
    assert (tmp_path / "gpu_kit_small.toml").exists()


def test_a_wrong_byte_is_an_exit_status_of_1_and_a_failed_part_is_on_the_page(tmp_path: Path) -> None:
    broken = "\n".join(
        (
            f"sys.path.insert(0, {str(KIT.parents[2] / 'server_ext')!r})",
            "import sojourn_server.kv_offload.cuda_device_backend as b",
            "b.CudaDeviceBackend.to_device = lambda self, copies, after: b.CudaCopy(after, after, ())",
        )
    )
    result = run("--small", "--steps", "300", "--out", str(tmp_path), before=broken)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "LOOK AT THE PAGE" in result.stdout
    document = json.loads((tmp_path / "gpu_kit_small.json").read_text())
    assert sum(row["wrong"] for row in document["order"]["layouts"]) > 0


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    result = run("--out", str(tmp_path), before="import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''")
    assert result.returncode == 1
    assert "torch finds no CUDA device; --small tries the kit out" in result.stderr
    assert not list(tmp_path.iterdir())
