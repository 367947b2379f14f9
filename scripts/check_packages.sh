#!/usr/bin/env bash
# Build the wheel and the source archive. Install the wheel into a clean environment of each Python that is here,
# alone and then with the extra `server`. `make packages` runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m hatchling build -d "$work/dist" >/dev/null 2>&1
wheel=$(echo "$work"/dist/*.whl)
sources=$(pwd)
cd "$work"  # so that no Python finds the sources beside it

for version in 3.10 3.11 3.12 3.13 3.14; do
    python=$(command -v "python$version") && "$python" -c '' 2>/dev/null || {
        echo "Python $version is not here: left out"
        continue
    }
    "$python" -m venv "$version"
    "$version/bin/python" -m pip install --quiet "$wheel"
    "$version/bin/python" -I -W error "$sources/scripts/check_installed_sdk.py"
    "$version/bin/python" -m pip install --quiet "$wheel[server]"
    "$version/bin/sojourn" --help >/dev/null
    "$version/bin/sojourn" gateway --help >/dev/null
    echo "the command line works on Python $version"
done
