"""``pip install`` by uv, into the environment of this script's interpreter. uv installs the same packages
faster.

    python scripts/install.py ARGUMENTS

uv gets the settings that the user made for pip. If uv is missing, fails, or has no equivalent of a setting,
pip installs. ``INSTALLER=pip`` leaves uv out.
"""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

OF_UV = {
    "cert": "SSL_CERT_FILE",
    "constraint": "UV_CONSTRAINT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "proxy": "ALL_PROXY",
    "retries": "UV_HTTP_RETRIES",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""Settings of pip that have a value, and the environment variables with which uv takes the value."""
SWITCHES_OF_UV = {
    "no-cache-dir": ("UV_NO_CACHE", "1"),
    "no-index": ("UV_NO_INDEX", "1"),
    "pre": ("UV_PRERELEASE", "allow"),
}
WITHOUT_EFFECT = {
    "cache-dir", "compile", "config-file", "disable-pip-version-check", "no-color", "no-input", "quiet",
    "progress-bar", "require-virtualenv", "resume-retries", "root-user-action", "verbose",
}  # fmt: skip
"""Settings that do not change what is installed, or that ``uv_settings`` reads itself."""


class NoEqualError(Exception):
    """A setting of pip for which uv has no equivalent."""


def pip_settings(listing: str) -> dict[str, str]:
    """The settings that ``pip install`` reads, by name. ``listing`` is the output of ``pip config list``."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        name, separator, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if separator and section in sections:
            sections[section][key] = ast.literal_eval(value)
    return {key: value for section in sections.values() for key, value in section.items()}


def _is_on(value: str) -> bool:
    return value.strip().lower() in {"1", "on", "true", "t", "y", "yes"}


def uv_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment variables with which uv installs as pip does with these settings.

    Raises ``NoEqualError`` for a setting that uv has no equivalent for."""
    # With several indexes pip takes the newest release of all, but uv takes releases only from the first
    # index that has the package. pip trusts the system's certificates, and compiles what it installs.
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "1"}
    if _is_on(settings.get("compile", "1")):
        found["UV_COMPILE_BYTECODE"] = "1"
    for key, value in settings.items():
        if key in OF_UV:
            found[OF_UV[key]] = ("," if key == "find-links" else " ").join(value.split())
        elif key in SWITCHES_OF_UV:
            if _is_on(value):
                name, found_value = SWITCHES_OF_UV[key]
                found[name] = found_value
        elif key not in WITHOUT_EFFECT:
            raise NoEqualError(key)
    return found


def _with_uv(arguments: list[str]) -> bool:
    """Install with uv. Return whether uv succeeded."""
    if os.environ.get("INSTALLER") == "pip":
        return False
    ours = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "uv"
    uv = str(ours) if ours.exists() else shutil.which("uv")
    if uv is None:
        return False
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    try:
        settings = uv_settings(pip_settings(listing.stdout))
    except NoEqualError as error:
        print(f"install: pip installs, since uv has no equal of pip's setting {error}", file=sys.stderr)
        return False
    if (
        subprocess.call(
            [uv, "pip", "install", "--python", sys.executable, *arguments], env=settings | os.environ
        )
        == 0
    ):
        return True
    print("install: uv failed; pip tries", file=sys.stderr)
    return False


def main(arguments: list[str]) -> int:
    try:
        if _with_uv(arguments):
            return 0
        return subprocess.call([sys.executable, "-m", "pip", "install", *arguments])
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
