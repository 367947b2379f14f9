"""An engine's steward as its settings want it: with a profile, and with a tape where one is to be written."""

from __future__ import annotations

from vllm.logger import init_logger

from ..engine.desk import Desk
from ..engine.state import Histories, Pool
from ..engine.steward import Steward
from ..policy.preset import Preset
from .engine_facts import vllm_version
from .settings import Settings

logger = init_logger("vllm.sojourn")


def steward_of(
    settings: Settings, preset: Preset, pool: Pool, histories: Histories, rank: int | None
) -> tuple[Steward, Desk | None]:
    """The steward, and its desk where a tape is to be written: both then write down what they are told."""
    profile = settings.profile()
    curve = profile.prefill if profile is not None else None
    limits = settings.limits()
    if settings.tape_file is None:
        return Steward(preset, pool, limits=limits, curve=curve, histories=histories), None
    from ..engine.tape import Header, TapeFile, TapingDesk, TapingSteward

    text, source = settings.preset_toml()
    header = Header.of(
        preset_toml=text,
        preset_source=source,
        pool=pool,
        limits=limits,
        curve=curve,
        histories=histories,
        versions={"vllm": vllm_version()},
    )
    path = settings.tape_file if rank is None else f"{settings.tape_file}.rank{rank}"

    def warn(text: str) -> None:
        logger.warning("sojourn: %s; the engine goes on", text)

    tape = TapeFile(path, header, warn=warn)
    steward = TapingSteward(tape, preset, pool, limits=limits, curve=curve, histories=histories)
    return steward, TapingDesk(steward)
