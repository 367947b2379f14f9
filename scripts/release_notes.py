"""Print the notes of one release, which are its part of CHANGELOG.md.

python scripts/release_notes.py 0.1.0           # refuses a version without a date
python scripts/release_notes.py 0.1.0 --draft   # prints it all the same

The exit code is 1, with one line of output, if pyproject.toml or the SDK has another version.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


class ReleaseError(ValueError):
    """Raised for a release that the files do not describe."""


def release_notes(changelog: str, version: str, *, draft: bool = False) -> str:
    """Return the text below the head of ``version``. Raises ReleaseError if there is none, if it is empty, or
    if the head has no date and ``draft`` is false."""
    found = re.search(
        rf"^## \[{re.escape(version)}\] - ([^\n]+)\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no head '## [{version}] - DATE'")
    date, notes = found.group(1).strip(), found.group(2).strip()
    if not draft and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        raise ReleaseError(f"CHANGELOG.md dates {version} '{date}'; a release needs YYYY-MM-DD")
    if not notes:
        raise ReleaseError(f"CHANGELOG.md says nothing about {version}")
    return notes + "\n"


def declared_versions(root: Path = ROOT) -> dict[str, str]:
    """Return each file that states the version, and the version it states."""
    places = {
        "pyproject.toml": r'^version = "(.+)"$',
        "sdk/sojourn/__init__.py": r'^__version__ = "(.+)"$',
    }
    found = {}
    for place, pattern in places.items():
        match = re.search(pattern, (root / place).read_text(encoding="utf-8"), re.MULTILINE)
        found[place] = match.group(1) if match else "no version"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("version", help="such as 0.1.0; a leading v is taken off")
    parser.add_argument("--draft", action="store_true", help="accept a version without a date")
    options = parser.parse_args()
    version = options.version.removeprefix("v")
    try:
        for place, stated in declared_versions().items():
            if stated != version:
                raise ReleaseError(f"{place} says {stated}, expected {version}")
        changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        sys.stdout.write(release_notes(changelog, version, draft=options.draft))
    except ReleaseError as error:
        sys.exit(f"release_notes: {error}")


if __name__ == "__main__":
    main()
