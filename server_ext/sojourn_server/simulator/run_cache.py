"""Cache of finished runs in a folder, with which an interrupted suite continues where it stopped."""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from dataclasses import asdict
from pathlib import Path

import msgspec

from sojourn_server.traces.atomic_files import write_atomically

from .limits.eviction_replay import EvictionReplayResult
from .run_log import RunLog
from .simulation_run import RunSpec

_PACKAGES = (
    "core", "gateway", "kv_offload", "kv_transfer", "launch", "metrics", "models", "policies", "predictors",
    "profiling", "programs", "recording", "routing", "simulator", "traces", "vllm",
)  # fmt: skip
"""Packages that influence the result of a run."""


class RunOutcome(msgspec.Struct, kw_only=True):
    """Result of one run."""

    log: RunLog
    orders: dict[str, EvictionReplayResult] = msgspec.field(default_factory=dict)
    """Results of replaying the run's block accesses, by eviction order. Empty if they were not recorded."""
    sent_s: list[float] = msgspec.field(default_factory=list)
    """Time at which each request was sent, in the order of the access log."""


class _CachedRun(msgspec.Struct, kw_only=True):
    spec: dict[str, str | int | float | bool | None]
    made_of: str
    outcome: RunOutcome


class RunCache:
    """A folder of outcomes, one file per run.

    An entry is valid only for the same code and the same trace, preset and profile files. Modules of a user's
    preset are not checked.
    """

    def __init__(self, folder: str | Path, code: str | None = None) -> None:
        """``code`` identifies the code that makes the runs; default: ``code_digest()``."""
        self._folder = Path(folder)
        self._code = code if code is not None else code_digest()

    def get(self, spec: RunSpec) -> RunOutcome | None:
        """The cached outcome of ``spec``; ``None`` if there is no valid entry."""
        try:
            kept = msgspec.msgpack.decode(gzip.decompress(self._path(spec).read_bytes()), type=_CachedRun)
        except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return kept.outcome if (kept.spec, kept.made_of) == (asdict(spec), self._made_of(spec)) else None

    def put(self, spec: RunSpec, outcome: RunOutcome) -> None:
        """Store an outcome. Raises ``OSError``."""
        kept = _CachedRun(spec=asdict(spec), made_of=self._made_of(spec), outcome=outcome)
        data = gzip.compress(msgspec.msgpack.encode(kept), compresslevel=6, mtime=0)
        write_atomically({self._path(spec): data})

    def _path(self, spec: RunSpec) -> Path:
        label = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(spec.workload).name}-{spec.label}").strip("-")
        key = msgspec.json.encode([asdict(spec), self._made_of(spec)])
        return self._folder / f"{label}-{hashlib.sha256(key).hexdigest()[:12]}.msgpack.gz"

    def _made_of(self, spec: RunSpec) -> str:
        """Digest of the code and of all files that ``spec`` names. An entry with another digest is
        invalid."""
        digest = hashlib.sha256(self._code.encode())
        # With replicas, the part of the policy after ROUTING/ may be a file too.
        engines = spec.policy.partition("/")[2] if spec.replicas is not None else None
        for name in (spec.workload, spec.policy, engines, spec.hardware, spec.model):
            if name and Path(name).is_file():
                digest.update(Path(name).read_bytes())
        return digest.hexdigest()[:12]


def code_digest(package: Path | None = None) -> str:
    """Digest of all source files that a run depends on. ``package``: the folder ``sojourn_server``."""
    here = package if package is not None else Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package_name in _PACKAGES:
        for path in sorted((here / package_name).rglob("*")):
            if path.suffix in (".py", ".toml"):
                digest.update(path.relative_to(here).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
