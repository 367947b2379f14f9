"""What the operator sets: the ``sojourn`` object of vLLM's ``--additional-config``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..engine.state import StewardLimits
from ..policy.compute_quota import AttentionCosts
from ..policy.costs import EngineProfile
from ..policy.own_policies import classes_beside
from ..policy.preset import Preset, parse_preset, preset_text

CONFIG_KEY = "sojourn"


class SettingsError(ValueError):
    """A setting is wrong; the text names it, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set, resolved once when the engine starts."""

    policy: str = "continuum"
    """A preset's name."""
    policy_file: str | None = None
    """A TOML file that takes the preset's place."""
    history_file: str | None = None
    """Tool history: loaded at start, saved on exit and every few minutes."""
    network_file: str | None = None
    """Where policies that read hidden states keep the network that does: loaded at start, saved likewise."""
    profile_file: str | None = None
    """Engine profile written by ``sojourn profile``."""
    tape_file: str | None = None
    """Where all that the policies are told and answer is written down, to be replayed in the lab."""
    lease_budget_fraction: float = 0.95
    max_hinted_ttl_s: float = 300.0
    return_grace_s: float = 2.0
    gate_timeout_s: float = 600.0
    """A request whose program gets no place on the device for so long is refused with an error."""
    max_programs: int = 20_000
    compute_quota_s: float = 0.0
    """Seconds of attention that a step may take at most, going by the profile; 0: any."""
    strict: bool = False
    """Raise our own errors instead of counting them and carrying on. For tests."""

    @classmethod
    def read(cls, additional_config: Any) -> Settings:
        """From vLLM's ``additional_config``. Raises ``SettingsError``."""
        raw = additional_config.get(CONFIG_KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(raw, Mapping):
            raise SettingsError(f"additional_config.{CONFIG_KEY} is {raw!r}; expected an object")
        known = {field.name: field for field in fields(cls)}
        for key, value in raw.items():
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise SettingsError(f"unknown sojourn setting {key!r}; expected {', '.join(known)}{hint}")
            _check_type(key, value, getattr(cls(), key))
        settings = cls(**raw)
        if not 0.0 <= settings.lease_budget_fraction <= 1.0:
            raise SettingsError(f"lease_budget_fraction is {settings.lease_budget_fraction}; expected 0 to 1")
        if settings.max_programs < 1:
            raise SettingsError(f"max_programs is {settings.max_programs}; expected at least 1")
        if settings.compute_quota_s and settings.profile_file is None:
            raise SettingsError(
                f"compute_quota_s is {settings.compute_quota_s:g}, and nothing says what attention costs "
                "here; expected a profile_file (sojourn profile measures one, --sojourn-profile names it)"
            )
        return settings

    def preset(self) -> Preset:
        """The chosen preset. Raises ``PresetError`` or ``SettingsError``."""
        text, source = self.preset_toml()
        own = classes_beside(Path(self.policy_file).parent) if self.policy_file is not None else None
        return parse_preset(text, source=source, own=own)

    def preset_toml(self) -> tuple[str, str]:
        """Its TOML, and what that came from. Raises ``PresetError`` or ``SettingsError``."""
        if self.policy_file is None:
            return preset_text(self.policy), f"{self.policy}.toml"
        path = Path(self.policy_file)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"policy_file {path}: {error.strerror}") from error
        return text, str(path)

    def profile(self) -> EngineProfile | None:
        """The engine profile, if one was named. Raises ``SettingsError``."""
        if self.profile_file is None:
            return None
        try:
            return EngineProfile.from_toml(Path(self.profile_file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"profile_file {self.profile_file}: {error}") from error

    def attention_costs(self, *, chunked: bool) -> AttentionCosts | None:
        """What the compute quota goes by; ``None``: there is no quota. ``chunked``: whether the engine cuts
        prompts. Raises ``SettingsError``."""
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
                f"profile_file {self.profile_file} does not say what a step costs, which compute_quota_s "
                "goes by; measure it again with sojourn profile (without --no-decode)"
            )
        if not steps.pair_s:
            raise SettingsError(
                f"in profile_file {self.profile_file} attention costs nothing, so compute_quota_s would keep "
                "nobody back; measure longer contexts: sojourn profile --max-context TOKENS"
            )
        return AttentionCosts.of(steps)

    def limits(self) -> StewardLimits:
        """The steward's bounds."""
        return StewardLimits(
            max_programs=self.max_programs,
            lease_budget_fraction=self.lease_budget_fraction,
            max_hinted_ttl_s=self.max_hinted_ttl_s,
            return_grace_s=self.return_grace_s,
            gate_timeout_s=self.gate_timeout_s,
        )


def check_scheduling(preset: Preset, scheduling_policy: str) -> None:
    """Whether the preset goes with vLLM's ``--scheduling-policy``. Raises ``SettingsError``."""
    if preset.placement.places and scheduling_policy == "priority":
        raise SettingsError(
            f"policy {preset.name} decides who runs by where programs' KV is, and --scheduling-policy "
            "priority by who is important; expected fcfs there, or a policy without placement"
        )


def _check_type(key: str, value: Any, default: Any) -> None:
    if isinstance(default, bool):
        good = isinstance(value, bool)
        expected = "true or false"
    elif isinstance(default, int | float):
        whole = isinstance(default, int)
        kinds = (int,) if whole else (int, float)
        good = (
            isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        )
        expected = "a whole number ≥ 0" if whole else "a number ≥ 0"
    else:
        good = isinstance(value, str)
        expected = "a string"
    if not good:
        raise SettingsError(f"sojourn setting {key} is {value!r}; expected {expected}")
