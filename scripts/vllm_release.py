"""Compare a release of vLLM with those that sojourn knows, and add it to them.

    python scripts/vllm_release.py check WHEEL_OR_FOLDER           # prints the differences
    python scripts/vllm_release.py add WHEEL_OR_FOLDER VERSION     # writes release_surfaces.json
    python scripts/vllm_release.py unpack WHEEL FOLDER             # extracts Python files and metadata

``WHEEL_OR_FOLDER``: a wheel, or a folder that contains ``vllm``. ``check`` compares a known release with what
is committed for it, and an unknown one with the newest known; its exit status is 1 if anything differs or the
release is unknown.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "server_ext"))

from sojourn_server.vllm.release_surface import (  # noqa: E402
    ReadSource,
    differences,
    directory_source,
    known_surfaces,
    read_surface,
    wheel_source,
)

SURFACES = ROOT / "server_ext" / "sojourn_server" / "vllm" / "release_surfaces.json"


def source_of(where: Path) -> ReadSource:
    return wheel_source(where) if where.is_file() else directory_source(where)


def version_of(where: Path) -> str:
    """Return the release of a wheel, or of the metadata in a folder."""
    names = [where.name] if where.is_file() else [each.name for each in where.glob("vllm*.dist-info")]
    found = [match.group(1) for name in names if (match := re.match(r"vllm(?:_cpu)?-([0-9.]+[0-9])", name))]
    if len(found) != 1:
        sys.exit(f"error: {where} has metadata of {len(found)} releases of vLLM; expected one")
    return found[0]


def check(where: Path) -> int:
    """Print the differences. Return the exit status."""
    version, known = version_of(where), known_surfaces()
    expected = known.get(version)
    newest = list(known)[-1]
    lines = differences(read_surface(source_of(where)), expected if expected is not None else known[newest])
    against = "what is committed for it" if expected is not None else f"{newest}, the newest known release"
    print(f"vLLM {version}: {len(lines)} differences from {against}")
    print(*(f"  {line}" for line in lines), sep="\n")
    return int(bool(lines) or expected is None)


def add(where: Path, version: str) -> int:
    """Write the release's surface. Return the exit status."""
    surfaces = known_surfaces() if SURFACES.exists() else {}
    surfaces[version] = read_surface(source_of(where))
    ordered = sorted(surfaces, key=lambda each: [int(part) for part in each.split(".")])
    document = {each: dict(sorted(surfaces[each].items())) for each in ordered}
    SURFACES.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{SURFACES.relative_to(ROOT)} has {', '.join(ordered)}")
    return 0


def unpack(wheel: Path, folder: Path) -> int:
    """Extract what can be read and imported without the compiled parts."""
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
