"""Step latency of a live engine, from the costs that ``sojourn profile`` fitted."""

from __future__ import annotations

from dataclasses import dataclass

from ...policies.costs.engine_profile import EngineProfile
from ...policies.costs.step_costs import StepCosts
from .latency_profiles import DISK_READ_BYTES_PER_S, DISK_WRITE_BYTES_PER_S, LatencyProfileError
from .latency_protocol import StepWork


@dataclass(frozen=True, slots=True)
class FittedLatency:
    """``LatencyModel`` that is linear in the work of a step, with coefficients fitted to measurements.

    Seconds of a step = step_s + token_s·tokens + pair_s·attention_pairs + kv_token_s·kv_tokens_read +
    request_s·requests. The coefficients are fields of ``costs``, the other factors fields of ``StepWork``.
    The model is accurate between the measured points (the profile's samples show the error). Beyond them, for
    example for a much larger batch, it is optimistic.
    """

    costs: StepCosts
    device_to_host_bytes_per_s: float | None
    """Measured copy rate; ``None``: not measured, so ``copy_s`` in this direction raises an error."""
    host_to_device_bytes_per_s: float | None

    @classmethod
    def of(cls, profile: EngineProfile) -> FittedLatency:
        """Build the model from ``profile``. Raises ``LatencyProfileError`` if the profile has no step costs,
        as one of ``sojourn profile --no-decode``."""
        if profile.steps is None:
            raise LatencyProfileError(
                "the engine profile holds no step costs; measure with sojourn profile, decoding included"
            )
        return cls(profile.steps, profile.device_to_host_bytes_per_s, profile.host_to_device_bytes_per_s)

    @property
    def call_s(self) -> float:
        """Seconds that the API server adds to every request's time to first token."""
        return self.costs.call_s

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step; an empty step has only its fixed cost."""
        step_s, token_s, pair_s, kv_token_s, request_s, _ = self.costs
        return (
            step_s
            + token_s * work.tokens
            + pair_s * work.attention_pairs
            + kv_token_s * work.kv_tokens_read
            + request_s * work.requests
        )

    def copy_s(self, kv_bytes: int, *, to_host: bool) -> float:
        """Seconds of one copy. Raises ``LatencyProfileError`` if the bandwidth of this direction was not
        measured."""
        if kv_bytes <= 0:
            return 0.0
        rate = self.device_to_host_bytes_per_s if to_host else self.host_to_device_bytes_per_s
        if rate is None:
            raise LatencyProfileError(
                "the engine profile holds no copy bandwidth; measure it on the server's machine, "
                "or simulate without host memory"
            )
        return kv_bytes / rate

    def disk_s(self, kv_bytes: int, *, to_disk: bool) -> float:
        """Seconds to write or read ``kv_bytes`` in files on a typical drive (not measured)."""
        return max(0, kv_bytes) / (DISK_WRITE_BYTES_PER_S if to_disk else DISK_READ_BYTES_PER_S)
