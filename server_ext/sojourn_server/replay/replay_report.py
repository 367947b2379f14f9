"""Collects the measurements of a replay, and shows them as a table or a JSON document."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from sojourn_server.metrics.summary_statistics import summarise

from .completions_client import Completion, RequestError

CACHED_TOKENS_MISSING = (
    "the server does not report cached tokens: start it with --enable-prompt-tokens-details"
)
FORCING_IGNORED = (
    "the server did not generate the forced tokens: start it with --logits-processors "
    "sojourn_server.vllm.forced_tokens:ForcedTokens (on CUDA with VLLM_USE_V2_MODEL_RUNNER=0)"
)
OUTPUTS_UNKNOWN = (
    "the server does not return token ids, so prompts contain synthetic outputs and each turn's output is "
    "computed again; use --force-tokens for exact prefixes"
)


class ReplayedTurn(NamedTuple):
    """Measurements of one turn that the server answered."""

    completion: Completion
    computed_again: int | None
    """Number of prompt tokens that the server computed and a perfect prefix cache would have had. ``None`` if
    the server does not report cached tokens."""
    forcing_failed: bool = False
    """Whether the server did not generate the forced tokens."""
    has_output_ids: bool = True
    """Whether later prompts contain the output of the server, not a synthetic one."""
    program_id: str = ""
    """Id of the program in the trace."""
    turn: int = 0
    """Index of the turn, from 0."""
    sent_s: float = 0.0
    """Time when the request was sent, in seconds after the replay's start."""


class ReplayedProgram(NamedTuple):
    """Result of one program that ended or was skipped."""

    program_id: str
    finished: bool = False
    completion_s: float | None = None
    """Seconds from the program's start to its last token, including tool times; ``None`` if unfinished."""
    reason: str = ""
    """Why the program did not finish."""
    clipped: bool = False
    """Whether the program's last turns were left out, because their contexts are too long."""
    turns: int = 0
    """Number of turns that the server answered."""


class ReplayTally:
    """Collects the counts and measurements of one replay."""

    def __init__(self) -> None:
        self.wall_s = 0.0
        self.turns: list[ReplayedTurn] = []
        """Turns that the server answered."""
        self.programs: list[ReplayedProgram] = []
        """Programs that ended or were skipped."""
        self.errors: Counter[str] = Counter()
        self.first_error: str | None = None

    def add_error(self, error: RequestError) -> None:
        """Count a failed request."""
        self.errors[error.reason] += 1
        self.first_error = self.first_error or str(error)

    @property
    def finished(self) -> list[ReplayedProgram]:
        """Programs that finished."""
        return [program for program in self.programs if program.finished]

    @property
    def unfinished(self) -> Counter[str]:
        """Number of unfinished programs by reason."""
        return Counter(program.reason for program in self.programs if not program.finished)

    def notes(self) -> list[str]:
        """Return the reasons, if any, why these figures are not comparable with those of other replays."""
        reasons = {
            CACHED_TOKENS_MISSING: any(turn.completion.cached_tokens is None for turn in self.turns),
            FORCING_IGNORED: any(turn.forcing_failed for turn in self.turns),
            OUTPUTS_UNKNOWN: any(not turn.has_output_ids for turn in self.turns),
        }
        return [note for note, applies in reasons.items() if applies]

    def document(self) -> dict[str, Any]:
        """Return all figures as JSON data, with units in the names; ``None`` if a figure was not measured."""
        completions, finished = [turn.completion for turn in self.turns], self.finished
        known = [c.cached_tokens for c in completions if c.cached_tokens is not None]
        cached_tokens = sum(known) if known and len(known) == len(completions) else None
        prompt_tokens = sum(c.prompt_tokens for c in completions)
        output_tokens = sum(c.output_tokens for c in completions)
        again = sum(turn.computed_again or 0 for turn in self.turns)
        return {
            "programs_finished": len(finished),
            "programs_unfinished": sum(self.unfinished.values()),
            "programs_clipped": sum(program.clipped for program in self.programs),
            "unfinished_reasons": dict(self.unfinished),
            "turns": len(completions),
            "wall_s": self.wall_s,
            "completion_s": summarise(p.completion_s for p in finished if p.completion_s is not None),
            "ttft_s": summarise(c.ttft_s for c in completions),
            "tpot_s": summarise(c.tpot_s for c in completions if c.tpot_s is not None),
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached_tokens,
            "computed_tokens": None if cached_tokens is None else prompt_tokens - cached_tokens,
            "regenerated_tokens": None if cached_tokens is None else again,
            "output_tokens": output_tokens,
            "output_tokens_per_s": output_tokens / self.wall_s if self.wall_s > 0 else None,
            "programs_per_hour": 3600 * len(finished) / self.wall_s if self.wall_s > 0 else None,
            "errors": dict(self.errors),
            "first_error": self.first_error,
            "notes": self.notes(),
        }

    def table(self) -> Table:
        """Return the figures of ``document`` as a table."""
        document = self.document()
        table = Table(title="replay", title_justify="left")
        # Long reasons wrap, so that large figures stay on one line in a terminal of 80 columns.
        table.add_column("", overflow="fold", min_width=12)
        statistics = ("mean", "p50", "p90", "p95", "p99")
        for name in statistics:
            table.add_column(name, justify="right", no_wrap=True)
        for label, field in (
            ("program completion, s", "completion_s"),
            ("time to first token, s", "ttft_s"),
            ("time per output token, s", "tpot_s"),
        ):
            table.add_row(label, *(_figure(document[field][name]) for name in statistics))
        table.add_section()
        for label, field in (
            ("programs finished", "programs_finished"),
            ("programs unfinished", "programs_unfinished"),
            ("turns", "turns"),
            ("prompt tokens", "prompt_tokens"),
            ("  from the cache", "cached_tokens"),
            ("  computed", "computed_tokens"),
            ("  of these computed again", "regenerated_tokens"),
            ("output tokens", "output_tokens"),
            ("output tokens / s", "output_tokens_per_s"),
        ):
            table.add_row(label, _figure(document[field]))
            if field == "programs_unfinished":
                for reason, count in self.unfinished.most_common():
                    table.add_row(f"  {escape(reason)}", _figure(count))
        return table


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if value >= 100 else f"{value:.4g}"
