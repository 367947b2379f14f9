"""Packs what a machine with a GPU and without a network needs beside torch: vLLM, cut down, and the rest.

    python benchmarks/gpu/pack.py --traces FOLDER

Needs the environment of ``make setup``, no GPU, and five minutes. Writes ``site.tar.xz`` and
``traces.jsonl.gz`` to ``out/gpu``, and fails if they and the repository's files are too large to travel. pip
takes vLLM's CUDA wheel and the packages of ``PACKAGES`` for the other machine.

Two cuts make the wheel small. Files in ``DROPPED`` go. In a CUDA library, the code for other devices, and for
shapes that ``engine.py`` does not run, becomes zeros: all offsets stay, the driver loads a kernel's code only
when the kernel first runs, and zeros compress to nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sojourn_server.models.model_cache import resolve_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MIB = 2**20
LIMIT_MIB = 64
"""Limit for all that travels."""
OUT = ROOT / "out" / "gpu"
VLLM = "0.32.0"
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
PACKAGES = (
    "annotated-types", "apache-tvm-ffi", "cachetools", "cbor2", "compressed-tensors", "distro", "fastapi",
    "httpcore2", "httpx2", "jiter", "jmespath", "jsonschema", "jsonschema-specifications", "llguidance",
    "loguru", "mistral-common", "model-hosting-container-standards", "msgspec", "openai", "oss-harmony",
    "partial-json-parser", "prometheus-fastapi-instrumentator", "pybase64", "pydantic", "pydantic-core",
    "pyzmq", "referencing", "rpds-py", "sniffio", "starlette", "truststore", "typing-inspection", "uvicorn",
    "watchfiles", "xgrammar",
)  # fmt: skip
"""What vLLM and sojourn load when they serve, and a machine with torch and transformers lacks."""
CUBIN, ARCHITECTURE = 2, 90
"""Kind of an entry with machine code, and the devices it is for: Hopper."""
SMALL_BYTES = 16 * 1024
"""Entries up to this size stay, whatever they are for."""
UNUSED_KERNELS = re.compile(rb"flash_fwd_hdim(?!128_bf16)")
"""FlashAttention for other sizes of a head and other types than those of ``engine.py``'s models."""
DROPPED = (
    "vllm/vllm-rs", "vllm/_moe_C*", "vllm/_qutlass_C*", "vllm/_flash*_C*", "vllm/_deepselect_C*",
    "vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/third_party/deep_gemm", "vllm/third_party/fmha_sm100",
    "vllm/entrypoints/serve/instrumentator/static", "**/*.pyi", "**/*.h", "**/*.hpp", "**/*.cuh", "**/*.cu",
    "**/*.lib", "**/*.dll", "**/tests", "bin", "share",
)  # fmt: skip
SAMPLE_PROGRAMS = 60
"""Programs of a trace file that travel."""
SAMPLED_FIELDS = ("prompt_tokens", "output_tokens", "gap_s", "tool_seconds", "gap_kind", "reset")


def fatbin_entries(library: bytes | bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Yield (kind, architecture, start, end) of each piece of device code in a library."""
    at = 0
    while (at := library.find(b"\x50\xed\x55\xba", at)) >= 0:
        number, header, size = struct.unpack_from("<HHQ", library, at + 4)
        if (number, header) != (1, 16):  # the same bytes, but no container
            at += 4
            continue
        entry, at = at + header, at + header + size
        while entry < at:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            yield kind, architecture, entry + header, entry + header + size
            entry += header + size


def cut_library(path: Path) -> tuple[int, int]:
    """Clear the device code that is not needed. Return the bytes that were cleared and those that stay."""
    library = bytearray(path.read_bytes())
    cleared = kept = 0
    for kind, architecture, start, end in list(fatbin_entries(library)):
        needed = (kind, architecture) == (CUBIN, ARCHITECTURE)
        if needed and UNUSED_KERNELS.search(library, start, end):
            needed = False
        if needed or end - start <= SMALL_BYTES:
            kept += end - start
        else:
            library[start:end] = bytes(end - start)
            cleared += end - start
    path.write_bytes(library)
    return cleared, kept


def make_site(site: Path, vllm: str) -> None:
    """Fill a directory with packages for the other machine, and the names of sojourn's plugins."""
    wanted = [f"vllm=={vllm}", *(f"{name}{_same_version(name)}" for name in PACKAGES)]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [
            *pip, "install", "--target", str(site), "--no-deps", "--no-compile", "--only-binary=:all:",
            "--python-version", PYTHON, "--implementation", "cp", *platforms, *wanted,
        ],
        check=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        wheel = [*pip, "wheel", "--no-deps", "-w", name, str(ROOT)]
        subprocess.run(wheel, check=True)
        (made,) = Path(name).glob("*.whl")
        # Its sources travel as the repository. vLLM finds the plugins by the wheel's metadata.
        shutil.unpack_archive(made, Path(name) / "sojourn", "zip")
        for folder in (Path(name) / "sojourn").glob("*.dist-info"):
            shutil.copytree(folder, site / folder.name)
    # Models of random weights need a tokenizer. SOJOURN_CACHE names this directory.
    tiny = Path(resolve_model("tiny", progress=False))
    shutil.copytree(tiny, site / "models" / tiny.name, ignore=shutil.ignore_patterns("*.safetensors"))


def cut_site(site: Path) -> list[dict[str, Any]]:
    """Drop files and clear device code. Return one row for each library that has any."""
    for pattern in DROPPED:
        for path in list(site.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    rows = []
    for path in sorted(site.rglob("*.so")):
        cleared, kept = cut_library(path)
        if cleared:
            rows.append({"library": path.name, "kept": kept, "cleared": cleared})
    return rows


def sample_traces(folder: Path, target: Path, seed: int = 0) -> int:
    """Write lengths and times of some programs of each trace file. Return the number of programs."""
    count = 0
    with gzip.open(target, "wt", encoding="utf-8") as out:
        for path in sorted(folder.glob("*.jsonl*")):
            opener = gzip.open if path.suffix == ".gz" else open
            with opener(path, "rt", encoding="utf-8") as lines:
                programs = [json.loads(line) for line in lines]
            random.Random(seed).shuffle(programs)
            for program in programs[:SAMPLE_PROGRAMS]:
                turns = [
                    {key: turn[key] for key in SAMPLED_FIELDS if turn.get(key) is not None}
                    for turn in program["turns"]
                ]
                name = f"{path.name.split('.')[0]}-{count}"
                out.write(json.dumps({"program_id": name, "turns": turns}) + "\n")
                count += 1
    return count


def travelling_bytes(paths: list[Path]) -> dict[str, int]:
    """Return the sizes of the repository's files and of each packed file."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    sizes = {"the repository": sum(path.stat().st_size for path in files if path.is_file())}
    return sizes | {path.name: path.stat().st_size for path in paths if path.exists()}


def _same_version(name: str) -> str:
    """Return the version of a package in this environment, where the tests run, as pip writes it."""
    try:
        return f"=={version(name)}"
    except PackageNotFoundError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="directory for the packed files")
    parser.add_argument("--vllm", default=VLLM, help="version of vLLM")
    parser.add_argument("--traces", type=Path, help="directory of trace files to take a sample of")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB, help="limit for all that travels")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    archive, sample = arguments.out / "site.tar.xz", arguments.out / "traces.jsonl.gz"
    if arguments.traces is not None:
        print(f"{sample_traces(arguments.traces, sample)} programs in {sample}")
    with tempfile.TemporaryDirectory() as name:
        site = Path(name) / "site"
        make_site(site, arguments.vllm)
        for row in cut_site(site):
            print(f"{row['library']}: {row['kept'] / MIB:.1f} MiB kept, {row['cleared'] / MIB:.1f} cleared")
        with tarfile.open(archive, "w:xz", preset=6) as packed:
            packed.add(site, ".")
    sizes = travelling_bytes([archive, sample])
    total = sum(sizes.values()) / MIB
    print("\n".join(f"{size / MIB:7.1f} MiB  {what}" for what, size in sizes.items()))
    print(f"{total:7.1f} MiB  in all, of {arguments.limit_mib:g}")
    return int(total > arguments.limit_mib)


if __name__ == "__main__":
    sys.exit(main())
