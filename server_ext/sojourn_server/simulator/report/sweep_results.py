"""Which rows of a suite belong to which value of what was swept, as it stands in JSON, tables and plots."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .run_row import RunRow


class SweepValue(msgspec.Struct, kw_only=True, frozen=True):
    """One value and its runs."""

    value: float
    runs: tuple[int, ...]
    """Places of its rows in the list of all, one a policy, in the policies' order."""
    host_tokens: int | None = None
    """Tokens of KV in the host memory that this value stands for; ``None``: something else was swept."""
    host_bytes: int | None = None
    """The same in bytes; ``None`` also where the size of a token is not known."""

    @property
    def text(self) -> str:
        """The value as people write it."""
        return f"{self.value:,.0f}" if self.value == int(self.value) else f"{self.value:g}"

    @property
    def host_text(self) -> str | None:
        """Host memory: in GiB, or in tokens where bytes are not known; ``None``: it is not what was swept."""
        if self.host_bytes is not None:
            gib = self.host_bytes / 2**30
            return f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.3g} GiB"
        return None if self.host_tokens is None else f"{self.host_tokens:,} tokens"


class SweepRuns(msgspec.Struct, kw_only=True, frozen=True):
    """A sweep over the rows of one suite."""

    field: str
    """Of ``lab.run.RunSpec``."""
    meaning: str
    """What the field is, with its unit."""
    values: tuple[SweepValue, ...]
    """In the order in which they were named."""

    def rows_of(self, value: SweepValue, rows: Sequence[RunRow]) -> list[RunRow]:
        """Those of ``rows``, the suite's, that belong to ``value``."""
        return [rows[place] for place in value.runs]


def sweep_runs(
    field: str,
    meaning: str,
    values: Sequence[float],
    rows: Sequence[RunRow],
    *,
    is_host_sweep: bool = False,
    kv_bytes_per_token: int | None = None,
) -> SweepRuns:
    """``rows`` are those of ``ParameterSweep.specs``: values outermost, with as many policies at each.

    ``is_host_sweep``: the value is an amount of host memory, which is told in tokens, and with
    ``kv_bytes_per_token`` in bytes. Raises ``ValueError`` where rows and values do not go together.
    """
    policies, left = divmod(len(rows), len(values))
    if left or not policies:
        raise ValueError(f"{len(rows)} rows at {len(values)} values; expected as many at each")
    made = []
    for number, value in enumerate(values):
        runs = range(number * policies, (number + 1) * policies)
        tokens = _host_tokens([rows[place] for place in runs]) if is_host_sweep else None
        size = tokens * kv_bytes_per_token if tokens is not None and kv_bytes_per_token is not None else None
        made.append(SweepValue(value=value, runs=tuple(runs), host_tokens=tokens, host_bytes=size))
    return SweepRuns(field=field, meaning=meaning, values=tuple(made))


def _host_tokens(rows: Sequence[RunRow]) -> int:
    # A limit has a host memory of its own, and a policy without any has none at all values.
    return max((row.host_blocks * row.block_size for row in rows if not row.limit), default=0)
