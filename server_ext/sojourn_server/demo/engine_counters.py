"""Counters from the engine's Prometheus page. An arm's figures are the difference of two readings."""

from __future__ import annotations

from dataclasses import dataclass

import httpx


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Totals since the server started."""

    ttft_sum_s: float = 0.0
    """Sum over requests of the seconds from arrival to first token."""
    ttft_count: float = 0.0
    preemptions: float = 0.0

    def since(self, before: EngineCounters) -> EngineCounters:
        """Return the growth since ``before``, an earlier reading of the same server."""
        return EngineCounters(
            self.ttft_sum_s - before.ttft_sum_s,
            self.ttft_count - before.ttft_count,
            self.preemptions - before.preemptions,
        )

    @property
    def ttft_mean_s(self) -> float | None:
        """Mean time to first token; ``None`` if there was no request."""
        return self.ttft_sum_s / self.ttft_count if self.ttft_count else None


_SERIES = {
    "vllm:time_to_first_token_seconds_sum": "ttft_sum_s",
    "vllm:time_to_first_token_seconds_count": "ttft_count",
    "vllm:num_preemptions_total": "preemptions",
}


def read_counts(url: str, headers: dict[str, str] | None = None) -> EngineCounters:
    """Return the counters of the server at ``url``, summed over its engines. Raises ``httpx.HTTPError``."""
    answer = httpx.get(f"{url}/metrics", headers=headers, timeout=10.0, trust_env=False)
    answer.raise_for_status()
    return parse_counts(answer.text)


def parse_counts(text: str) -> EngineCounters:
    """Return the counters in the text of a Prometheus page, summed over labels. Ignores other lines."""
    sums = dict.fromkeys(_SERIES.values(), 0.0)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _SERIES:
            sums[_SERIES[name]] += float(line.rpartition(" ")[2])
    return EngineCounters(**sums)
