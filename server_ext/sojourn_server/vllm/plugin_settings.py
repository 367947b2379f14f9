"""The plugin's settings: the ``sojourn`` object of vLLM's ``--additional-config``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from sojourn.errors import InputError

from ..core.engine_answers import MissingTiers
from ..core.scheduler_state import Histories, KVPoolConfig, SchedulerLimits, SchedulerState
from ..launch.kv_options import OFFLOAD_CONNECTOR, PREFILL_DECODE_CONNECTOR
from ..policies.costs.engine_profile import EngineProfile
from ..policies.prefill_decode.prefill_compute_quota import AttentionCosts
from ..policies.preset import Preset, parse_preset, preset_text
from ..policies.preset_store import DEFAULT_PRESET, custom_class_loader
from ..policies.toml_document import did_you_mean
from .compat import running_vllm

if TYPE_CHECKING:
    from ..core.program_scheduler import ProgramScheduler
    from .compat import VllmConfig

CONFIG_KEY = "sojourn"

logger = logging.getLogger("vllm.sojourn")

_LIMITS = SchedulerLimits()
"""Default values of the settings that are also in ``SchedulerLimits``."""


class SettingsError(InputError):
    """A setting is wrong. The error's text names the setting and what was expected."""


_T = TypeVar("_T")


def read_settings(given: Mapping[str, Any], kind: type[_T], what: str) -> _T:
    """Return the dataclass ``kind`` with the values ``given``. Raises ``SettingsError``. ``what``: what the
    error calls a value."""
    known = {each.name: each.type for each in fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise SettingsError(f"unknown {what} {name!r}; expected {', '.join(known)}{hint}")
    try:
        return msgspec.convert(dict(given), kind)
    except (msgspec.ValidationError, OverflowError) as error:
        expected, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        if expected.startswith("Invalid enum value"):
            expected = f"expected {known[name]}"
        expected = expected[:1].lower() + expected[1:]
        value = f" {name} is {given[name]!r};" if name in given else ":"
        raise SettingsError(f"{what}{value} {expected}") from None


Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """All settings, read once when the engine starts. ``SchedulerLimits`` explains the settings that have no
    text here."""

    policy: str = DEFAULT_PRESET
    """Name of a preset."""
    policy_file: str | None = None
    """Path of a TOML file that is used instead of a shipped preset."""
    allow_policy_modules: str | None = None
    """Installed packages whose classes the policy file may name, separated by commas."""
    history_file: str | None = None
    """File of the learned histories: loaded at start, saved at the end and every few minutes."""
    network_file: str | None = None
    """File of the length predictor's network: loaded at start, saved while the engine runs and at its end."""
    profile_file: str | None = None
    """Path of an engine profile written by ``sojourn profile``."""
    recording_file: str | None = None
    """File in which sojourn records all events and decisions, for replay in the simulator."""
    lease_budget_fraction: Annotated[float, Meta(ge=0, le=1)] = _LIMITS.lease_budget_fraction
    max_hinted_ttl_s: Seconds = _LIMITS.max_hinted_ttl_s
    return_grace_s: Seconds = _LIMITS.return_grace_s
    gate_timeout_s: Seconds = _LIMITS.gate_timeout_s
    """Maximum seconds that a request waits until its program is placed on the device. After that, the request
    is refused with an error. Only for policies that refuse requests."""
    hold_timeout_s: Seconds = _LIMITS.hold_timeout_s
    """For policies that refuse no requests: maximum seconds that a request waits until its program is placed
    on the device. After that, the request no longer waits for placement."""
    queue_patience_s: Seconds = _LIMITS.queue_patience_s
    """Seconds after which a waiting request gets privileges (``SchedulerLimits.queue_patience_s``)."""
    max_programs: Annotated[int, Meta(ge=1)] = _LIMITS.max_programs
    tool_call_parser: str | None = None
    """Name of the vLLM tool parser that reads outputs first; a value of vLLM's ``--tool-call-parser``. If it
    finds no call, sojourn's own parser reads the output."""
    tool_parser_plugin: str | None = None
    """Python file that registers this parser; a value of vLLM's ``--tool-parser-plugin``."""
    session_header: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_!#$%&'*+.^`|~-]+\Z")] | None = None
    """Name of a header in which clients name their program, read before those of known clients."""
    compute_quota_s: Seconds = 0.0
    """Maximum seconds of attention in a step with prompts, estimated from the profile; 0 for no limit."""
    allow_missing_tiers: bool = False
    """Whether a preset that needs host memory may run without host memory that sojourn manages."""
    strict: bool = False
    """Whether errors of sojourn are raised instead of logged. For tests."""

    @classmethod
    def read(cls, additional_config: Any) -> PluginSettings:
        """Return the settings in vLLM's ``additional_config``, or the defaults. Raises ``SettingsError``."""
        raw = additional_config.get(CONFIG_KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(raw, Mapping):
            raise SettingsError(f"additional_config.{CONFIG_KEY} is {raw!r}; expected an object")
        settings = read_settings(raw, cls, "sojourn setting")
        if settings.compute_quota_s and settings.profile_file is None:
            raise SettingsError(
                f"compute_quota_s is {settings.compute_quota_s:g}, but the cost of attention is unknown; "
                "expected a profile_file (sojourn profile measures one, --sojourn-profile names it)"
            )
        return settings

    def preset(self) -> Preset:
        """Return the parsed preset. Raises ``PresetError`` or ``SettingsError``."""
        text, source = self.preset_toml()
        own = None
        if self.policy_file is not None:
            own = custom_class_loader(Path(self.policy_file).parent, self.allow_policy_modules or "")
        return parse_preset(text, source=source, own=own)

    def preset_toml(self) -> tuple[str, str]:
        """Return the preset's TOML text and its file name. Raises ``PresetError`` or ``SettingsError``."""
        if self.policy_file is None:
            return preset_text(self.policy), f"{self.policy}.toml"
        path = Path(self.policy_file)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(f"policy_file {path}: {reason}") from error
        return text, str(path)

    def profile(self) -> EngineProfile | None:
        """Return the engine profile; ``None`` without ``profile_file``. Raises ``SettingsError``."""
        if self.profile_file is None:
            return None
        try:
            return EngineProfile.from_toml(Path(self.profile_file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"profile_file {self.profile_file}: {error}") from error

    def attention_costs(self, *, chunked: bool) -> AttentionCosts | None:
        """Return the attention costs for the compute quota; ``None`` without a quota. ``chunked``: whether
        the engine uses chunked prefill. Raises ``SettingsError``."""
        if not self.compute_quota_s:
            return None
        if not chunked:
            raise SettingsError(
                f"compute_quota_s is {self.compute_quota_s:g}, but this engine computes prompts whole; "
                "expected chunked prefill (no --no-enable-chunked-prefill)"
            )
        profile = self.profile()
        steps = profile.steps if profile is not None else None
        if steps is None:
            raise SettingsError(
                f"profile_file {self.profile_file} has no costs of a step, which compute_quota_s "
                "needs; measure it again with sojourn profile (without --no-decode)"
            )
        if not steps.pair_s:
            raise SettingsError(
                f"in profile_file {self.profile_file} attention costs nothing, so compute_quota_s would "
                "limit no step; measure longer contexts: sojourn profile --max-context TOKENS"
            )
        return AttentionCosts.of(steps)

    def limits(self) -> SchedulerLimits:
        """Return the limits of the ``ProgramScheduler``, made from the settings of the same names."""
        names = [field.name for field in fields(SchedulerLimits) if hasattr(self, field.name)]
        return SchedulerLimits(**{name: getattr(self, name) for name in names})


def data_parallel_rank(vllm_config: VllmConfig) -> int | None:
    """Return the engine's data-parallel rank; ``None`` for no rank. The engine adds the rank to the names of
    its files.

    vLLM makes each rank of a dense model an engine of its own, with data-parallel size 1 and rank 0. Only
    ``data_parallel_index`` keeps the rank. The engine of rank 0 then looks like a single engine: ``None``.
    """
    parallel = vllm_config.parallel_config
    rank: int = parallel.data_parallel_index
    return rank if parallel.data_parallel_size > 1 or rank > 0 else None


def rank_file(path: str, rank: int | None) -> str:
    """Return the path of one engine's own file: ``path``, with ``.rankN`` appended for data-parallel rank
    N."""
    return path if rank is None else f"{path}.rank{rank}"


def build_program_scheduler(
    settings: PluginSettings, preset: Preset, pool: KVPoolConfig, histories: Histories, rank: int | None
) -> ProgramScheduler:
    """Return the engine's ``ProgramScheduler``. ``rank``: data-parallel rank, if any. If
    ``recording_file`` is set, the ``ProgramScheduler`` records its events and decisions."""
    from ..core.program_scheduler import ProgramScheduler

    profile = settings.profile()
    curve = profile.prefill if profile is not None else None
    state = SchedulerState(preset, pool, limits=settings.limits(), curve=curve, histories=histories)
    if settings.recording_file is None:
        return ProgramScheduler(state)
    from ..recording import RecordingFile, RecordingHeader, RecordingScheduler

    text, source = settings.preset_toml()
    header = RecordingHeader.of(
        state, preset_toml=text, preset_source=source, curve=curve, versions={"vllm": running_vllm()}
    )

    def warn(text: str) -> None:
        logger.warning("sojourn: %s; the engine goes on", text)

    recording = RecordingFile(rank_file(settings.recording_file, rank), header, warn=warn)
    return RecordingScheduler(state, recording)


def check_scheduling(preset: Preset, scheduling_policy: str) -> None:
    """Raise ``SettingsError`` if the preset places programs in tiers, and ``--scheduling-policy`` is
    ``priority``."""
    if preset.placement.is_used and scheduling_policy == "priority":
        raise SettingsError(
            f"--scheduling-policy is priority, but policy {preset.name} orders programs by where "
            "their KV is; expected --scheduling-policy fcfs, or a policy without placement"
        )


def missing_tiers(preset: Preset, connector: str | None, *, allowed: bool) -> MissingTiers | None:
    """Return the preset's mechanisms that are off with this ``connector``; ``None`` if none is off.

    ``connector``: the name in vLLM's ``--kv-transfer-config``; ``None`` without a connector. Raises
    ``SettingsError`` if mechanisms are off and the preset's placement needs host memory. ``allowed`` prevents
    this error.
    """
    mechanisms = preset.tier_mechanisms()
    if not mechanisms or connector == OFFLOAD_CONNECTOR:
        return None
    if connector is None:
        because = "the engine has no host memory for KV: add --kv-host-gib"
    elif connector == PREFILL_DECODE_CONNECTOR:
        because = "the store of its pair keeps KV, and is read for each request"
    else:
        because = (
            f"{connector} keeps KV outside of sojourn's control: give --kv-host-gib instead, without "
            "--tier-backend vllm"
        )
    if preset.placement.needs_tiers and not allowed:
        raise SettingsError(
            f"policy {preset.name} places programs in host memory, and {because}. Or choose another policy, "
            "or set allow_missing_tiers=true (sojourn serve --sojourn-option) to run without placement"
        )
    return MissingTiers(mechanisms, because)
