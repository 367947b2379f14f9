"""Compare a vLLM release with the releases that sojourn knows, or add it to them.

    python scripts/vllm_release.py check WHEEL_OR_FOLDER           # prints the differences
    python scripts/vllm_release.py add WHEEL_OR_FOLDER VERSION     # writes release_surfaces.json
    python scripts/vllm_release.py unpack WHEEL FOLDER             # extracts Python files and metadata

``WHEEL_OR_FOLDER`` is a wheel, or a folder that contains ``vllm``. ``check`` compares a known release with
its entry in release_surfaces.json, and an unknown release with the newest entry. Its exit status is 1 if
anything differs or the release is unknown.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "server_ext"), str(ROOT / "sdk")]

from release_surface import (  # noqa: E402
    SURFACES,
    ReadSource,
    differences,
    directory_source,
    known_surfaces,
    read_surface,
    wheel_source,
)


def source_of(where: Path) -> ReadSource:
    return wheel_source(where) if where.is_file() else directory_source(where)


def version_of(where: Path) -> str:
    """Return the vLLM version of a wheel (from its name) or a folder (from the metadata inside). Exits with
    an error if there is not exactly one version."""
    names = [where.name] if where.is_file() else [each.name for each in where.glob("vllm*.dist-info")]
    found = [match.group(1) for name in names if (match := re.match(r"vllm(?:_cpu)?-([0-9.]+[0-9])", name))]
    if len(found) != 1:
        sys.exit(f"error: {where} has metadata of {len(found)} releases of vLLM; expected one")
    return found[0]


def check(where: Path) -> int:
    """Print how the release in ``where`` differs from its entry in release_surfaces.json.

    A release without an entry is compared with the newest entry. Return the exit status: 1 if anything
    differs or the release has no entry.
    """
    version, known = version_of(where), known_surfaces()
    expected = known.get(version)
    newest = list(known)[-1]
    lines = differences(read_surface(source_of(where)), expected if expected is not None else known[newest])
    against = "what is committed for it" if expected is not None else f"{newest}, the newest known release"
    print(f"vLLM {version}: {len(lines)} differences from {against}")
    print(*(f"  {line}" for line in lines), sep="\n")
    return int(bool(lines) or expected is None)


def add(where: Path, version: str) -> int:
    """Write the interfaces of vLLM that sojourn uses into release_surfaces.json. Return the exit status."""
    surfaces = known_surfaces() if SURFACES.exists() else {}
    surfaces[version] = read_surface(source_of(where))
    ordered = sorted(surfaces, key=lambda each: [int(part) for part in each.split(".")])
    document = {each: dict(sorted(surfaces[each].items())) for each in ordered}
    SURFACES.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{SURFACES.relative_to(ROOT)} has {', '.join(ordered)}")
    return 0


def unpack(wheel: Path, folder: Path) -> int:
    """Extract the wheel's Python files and metadata, without compiled parts. Return the exit status."""
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith((".py", ".json", ".txt", "METADATA")):
                archive.extract(name, folder)
    print(f"{folder} has the Python files of {wheel.name}")
    return 0


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["check", where]:
            return check(Path(where))
        case ["add", where, version]:
            return add(Path(where), version)
        case ["unpack", wheel, folder]:
            return unpack(Path(wheel), Path(folder))
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
