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
from ..launch.kv_options import OFFLOAD_CONNECTOR, PAIR_CONNECTOR, PREFILL_DECODE_CONNECTOR, VLLM_CONNECTOR
from ..policies.costs.engine_profile import EngineProfile
from ..policies.costs.step_costs import StepCosts
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


class SettingsError(InputError):
    """A setting is wrong."""


_T = TypeVar("_T")


def read_settings(given: Mapping[str, Any], kind: type[_T], what: str) -> _T:
    """Return the dataclass ``kind`` with the values ``given``; an error calls each a ``what``."""
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
    """All settings, read when the engine starts. ``SchedulerLimits`` explains those without a text here."""

    policy: str = DEFAULT_PRESET  # name of a preset
    policy_file: str | None = None  # TOML file that is used instead of a shipped preset
    allow_policy_modules: str | None = None
    """Installed packages whose classes the policy file may name, separated by commas."""
    history_file: str | None = None  # learned histories: loaded at start, saved every few minutes
    network_file: str | None = None  # the length predictor's network: loaded at start, saved meanwhile
    profile_file: str | None = None  # engine profile written by ``sojourn profile``
    recording_file: str | None = None  # record of all events and decisions, for replay in the simulator
    lease_budget_fraction: Annotated[float, Meta(ge=0, le=1)] = _LIMITS.lease_budget_fraction
    max_hinted_ttl_s: Seconds = _LIMITS.max_hinted_ttl_s
    return_grace_s: Seconds = _LIMITS.return_grace_s
    hold_timeout_s: Seconds = _LIMITS.hold_timeout_s
    """Maximum seconds that a request waits until its program is placed on the device. Then the request no
    longer waits for placement."""
    queue_patience_s: Seconds = _LIMITS.queue_patience_s
    max_programs: Annotated[int, Meta(ge=1)] = _LIMITS.max_programs
    tool_call_parser: str | None = None
    """The vLLM tool parser that reads outputs before sojourn's own: vLLM's ``--tool-call-parser``."""
    tool_parser_plugin: str | None = None
    """Python file that registers it; a value of vLLM's ``--tool-parser-plugin``."""
    session_header: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_!#$%&'*+.^`|~-]+\Z")] | None = None
    """Header in which clients name their program, read before those of known clients."""
    compute_quota_s: Seconds = 0.0
    """Maximum seconds of attention in a step with prompts, by the profile; 0 for no limit."""
    allow_missing_tiers: bool = False
    """Whether a preset that needs host memory may run without host memory of sojourn's."""
    strict: bool = False
    """Whether errors of sojourn are raised instead of logged. For tests."""

    @classmethod
    def read(cls, additional_config: Any) -> PluginSettings:
        """Return the settings in ``additional_config``, or the defaults. Raises ``SettingsError``."""
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
        """Raises ``PresetError`` or ``SettingsError``."""
        (text, source), own = self.preset_toml(), None
        if self.policy_file is not None:
            own = custom_class_loader(Path(self.policy_file).parent, self.allow_policy_modules or "")
        return parse_preset(text, source=source, own=own)

    def preset_toml(self) -> tuple[str, str]:
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
        """Raises ``SettingsError``."""
        if self.profile_file is None:
            return None
        try:
            return EngineProfile.from_toml(Path(self.profile_file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"profile_file {self.profile_file}: {error}") from error

    def attention_costs(self, *, chunked: bool) -> StepCosts | None:
        """Return the costs for the compute quota, if there is one. Raises ``SettingsError``."""
        if not self.compute_quota_s:
            return None
        if not chunked:
            raise SettingsError(
                f"compute_quota_s is {self.compute_quota_s:g}, but this engine computes prompts whole; "
                "expected chunked prefill (no --no-enable-chunked-prefill)"
            )
        profile = self.profile()
        steps = profile.steps if profile is not None else None
        if steps is None or not steps.pair_s:
            raise SettingsError(
                f"profile_file {self.profile_file} has no costs of attention, which compute_quota_s needs; "
                "measure longer contexts: sojourn profile --max-context TOKENS, without --no-decode"
            )
        return steps._replace(token_s=0.0)

    def limits(self) -> SchedulerLimits:
        names = [field.name for field in fields(SchedulerLimits) if hasattr(self, field.name)]
        return SchedulerLimits(**{name: getattr(self, name) for name in names})


def data_parallel_rank(vllm_config: VllmConfig) -> int | None:
    """Return the engine's data-parallel rank, if it has one, which goes into the names of its files.

    vLLM makes each rank of a dense model an engine of its own, with data-parallel size 1 and rank 0. Only
    ``data_parallel_index`` keeps the rank. The engine of rank 0 then looks like a single engine: ``None``.
    """
    parallel = vllm_config.parallel_config
    rank: int = parallel.data_parallel_index
    return rank if parallel.data_parallel_size > 1 or rank > 0 else None


def rank_file(path: str, rank: int | None) -> str:
    """Return the path of one engine's own file, by its data-parallel rank."""
    return path if rank is None else f"{path}.rank{rank}"


def build_program_scheduler(
    settings: PluginSettings, preset: Preset, pool: KVPoolConfig, histories: Histories, rank: int | None
) -> ProgramScheduler:
    """Return the engine's ``ProgramScheduler``, which records its events if there is a ``recording_file``."""
    from ..core.program_scheduler import ProgramScheduler

    profile = settings.profile()
    curve = profile.prefill if profile is not None else None
    state = SchedulerState(preset, pool, limits=settings.limits(), curve=curve, histories=histories)
    if settings.recording_file is None:
        return ProgramScheduler(state)
    from ..recording.recording_file import RecordingFile, RecordingHeader, RecordingScheduler

    text, source = settings.preset_toml()
    header = RecordingHeader.of(
        state, preset_toml=text, preset_source=source, curve=curve, versions={"vllm": running_vllm()}
    )
    recording = RecordingFile(
        rank_file(settings.recording_file, rank),
        header,
        warn=lambda text: logger.warning("sojourn: %s; the engine goes on", text),
    )
    return RecordingScheduler(state, recording)


def check_scheduling(preset: Preset, scheduling_policy: str) -> None:
    if preset.placement.is_used and scheduling_policy == "priority":
        raise SettingsError(
            f"--scheduling-policy is priority, but policy {preset.name} orders programs by where "
            "their KV is; expected --scheduling-policy fcfs, or a policy without placement"
        )


def missing_tiers(preset: Preset, connector: str | None, *, allowed: bool) -> MissingTiers | None:
    """Return the preset's mechanisms that are off with the ``connector`` of this name in vLLM's
    ``--kv-transfer-config``, if any. Raises ``SettingsError`` if the preset's placement needs them, unless
    ``allowed``."""
    mechanisms = preset.tier_mechanisms()
    if connector == VLLM_CONNECTOR:
        # Placement orders its host memory, which has a copy of what the device computes.
        mechanisms = [each for each in mechanisms if each != "placement"]
    if not mechanisms or connector in (OFFLOAD_CONNECTOR, PAIR_CONNECTOR):
        return None
    if connector == VLLM_CONNECTOR:
        because = "vLLM's connector copies KV as it is computed, and loads it for requests alone"
    elif connector in (None, PREFILL_DECODE_CONNECTOR):
        because = "the engine has no host memory for KV: add --kv-host-gib"
    else:
        because = f"{connector} keeps KV outside of sojourn's control: give --kv-host-gib instead"
    if "placement" in mechanisms and not allowed:
        raise SettingsError(
            f"policy {preset.name} places programs in host memory, and {because}. Or choose another policy, "
            "or set allow_missing_tiers=true (sojourn serve --sojourn-option) to run without placement"
        )
    return MissingTiers(mechanisms, because)
