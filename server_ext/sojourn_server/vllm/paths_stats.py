"""How long steps stood still for KV, as vLLM logs it: "KV Transfer metrics: waited_s=…"."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from ..paths.step_times import StepTimes


@dataclass
class PathsStats(KVConnectorStats):  # type: ignore[misc]
    """What was summed travels as ``data`` alone."""

    data: dict[str, float] = field(default_factory=dict)
    """The members of ``StepTimes``, by name."""

    @classmethod
    def of(cls, times: StepTimes) -> PathsStats:
        return cls(data=asdict(times))

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together, as vLLM wants it: in this one."""
        for name, seconds in other.data.items():
            self.data[name] = self.data.get(name, 0.0) + seconds
        return self

    def reduce(self) -> dict[str, int | float]:
        """For a line of the log."""
        return {name: round(seconds, 4) for name, seconds in self.data.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())
