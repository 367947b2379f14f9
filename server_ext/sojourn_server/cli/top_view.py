"""What ``sojourn top`` shows of a live frame, as lines of styled text: the full screen and ``--once`` draw
them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from ..metrics.live_frame import EngineRow, LiveFrame, ProgramRow

MIN_WIDTH = 80
_TOOL_WIDTH = 10
LOSS = "bold #d55e00"
DIM = "dim"
MEMORY_STATES = (
    ("running", "█", "#0072b2"),
    ("leased", "▓", "#009e73"),
    ("cached", "▒", "#56b4e9"),
    ("used", "▒", "#56b4e9"),
    ("free", "·", DIM),
)
"""States of blocks as (state, glyph, colour). Within one bar each glyph occurs once, so bars can be read
without colours: the device's bar has every state but ``used``, all other bars have only ``used`` and
``free``."""
STATE_STYLES = {
    "thinking": "bold #0072b2",
    "tool": "#009e73",
    "waiting": "#e69f00",
    "gated": "#e69f00",
    "silent": LOSS,
    "ended": DIM,
}
_ORDER = ("thinking", "waiting", "gated", "tool", "idle", "silent", "ended")
_PLACES = ("device", "host", "disk", "waiting")
SLOW_ANSWER_S = 1.0
"""If an engine's answer takes at least this many seconds, the header shows how long it took, because the data
are that old."""
MAX_BARS = 4
"""Maximum number of engines with bars of their own. If there are more engines, each bar shows their sum."""


class ProgramView(NamedTuple):
    """A program's row, and values derived from it at the frame's time. Times are in seconds."""

    row: ProgramRow
    state: str
    """thinking: a request runs. waiting: a request is in the queue. gated: a request is not admitted yet.
    tool, idle: between two turns. silent: the client is gone. ended: the program is over."""
    for_s: float
    """Time in this state: since the request's arrival, or since the end of the last turn."""
    lease_left_s: float | None
    """Time until the lease's deadline, below 0 after it; ``None`` without a lease."""
    kv_bytes: int
    """KV on the device that the program owns."""


# -- numbers -----------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Return seconds in at most five characters: 40ms, 0.4s, 12s, 3m20, 2h05."""
    seconds = max(0.0, seconds)
    if seconds < 0.095:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole}s"
    if whole < 6000:
        return f"{whole // 60}m{whole % 60:02d}"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}" if whole < 360_000 else f"{whole // 86_400}d"


def count(number: float) -> str:
    """Return a number in at most five characters: 950, 12.3k, 1.2M."""
    return _scaled(number, 1000, "kMGT")


def size(number: float) -> str:
    """Return bytes in at most five characters: 512, 12.3M, 1.2G; powers of 1024."""
    return _scaled(number, 1024, "KMGT")


def _scaled(number: float, step: int, suffixes: str) -> str:
    if number < step:
        return f"{number:.0f}"
    for suffix in suffixes:
        number /= step
        if number < 999.5:
            return f"{number:.1f}{suffix}" if number < 99.95 else f"{number:.0f}{suffix}"
    return f"{number:.0f}{suffixes[-1]}"


def _percent(part: float, whole: float) -> str:
    if not whole:
        return "0%"
    return "<1%" if 0 < part < 0.005 * whole else f"{part / whole:.0%}"


def printable(text: str) -> str:
    """Return ``text`` on one line, with unprintable characters replaced. Ids and names come from clients."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def cut(text: str, width: int) -> str:
    """Return ``printable(text)``, cut to at most ``width`` columns. A cut text ends with …."""
    text = printable(text)
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)) + "…"


def cell(text: str, width: int, style: str = "", *, right: bool = False) -> Text:
    """Return ``text`` in exactly ``width`` columns, cut or padded with blanks."""
    found = Text(cut(text, width), style)
    found.align("right" if right else "left", width)
    return found


# -- programs ---------------------------------------------------------------------------


class Column(NamedTuple):
    """A column of the table."""

    name: str
    width: int
    meaning: str
    value: Callable[[ProgramView], Any]
    """Value of a program; ``None``: it has none, which the table shows as –."""
    form: Callable[[Any], str] = str
    key: Callable[[ProgramView], Any] | None = None
    """Key by which the table is sorted, in place of the value."""
    right: bool = True

    def text(self, view: ProgramView) -> str:
        """Return the value as the table shows it."""
        value = self.value(view)
        return "–" if value is None else self.form(value)

    def sort_key(self, view: ProgramView) -> Any:
        """Return the key by which the table is sorted, highest first."""
        return (self.value(view) or 0.0) if self.key is None else self.key(view)


def program_view(row: ProgramRow, engines: dict[str, EngineRow]) -> ProgramView:
    """Return the view of one program. ``engines``: the frame's engines by name."""
    engine = engines.get(row.engine)
    now_s = engine.now_s if engine is not None else row.since_s
    block_bytes = engine.block_bytes if engine is not None else 0
    left_s = None if row.lease_until_s is None else row.lease_until_s - now_s
    return ProgramView(
        row, _state(row), max(0.0, now_s - row.since_s), left_s, row.device_blocks * block_bytes
    )


def _state(row: ProgramRow) -> str:
    if row.status == "reasoning":
        return "thinking" if row.running else "waiting"
    if row.status == "acting":
        return "tool" if row.tool and not row.tool_ended else "idle"
    return {"expired": "silent"}.get(row.status, row.status)


def _tier(view: ProgramView) -> str | None:
    row = view.row
    held = {"device": row.device_blocks or row.lease_blocks, "host": row.host_blocks, "disk": row.disk_blocks}
    place = row.placed or next((tier for tier, blocks in held.items() if blocks), None)
    if place == "device":
        return f"dev {size(view.kv_bytes)}" if view.kv_bytes else "dev"
    return place


def _tool(view: ProgramView) -> str:
    """Return the name of the tool that runs, or only the part after its colon if the name does not fit."""
    name = "" if view.state == "ended" or view.row.tool_ended else view.row.tool or ""
    return name if cell_len(name) <= _TOOL_WIDTH else name.partition(":")[2] or name


def _state_sort_key(view: ProgramView) -> tuple[float, ...]:
    """Sort key of the column STATE, highest first: states in the order of ``_ORDER``. Within a state, the
    program that has been in it longest comes first. Of ended programs, the newest comes first."""
    rank = -float(_ORDER.index(view.state)) if view.state in _ORDER else -9.0
    return (rank, view.row.since_s if view.state == "ended" else -view.row.since_s)


COLUMNS = (
    Column(
        "STATE", 8,
        "thinking: a request runs. waiting: a request is in vLLM's queue. gated: the policy has not admitted "
        "it yet. tool, idle: between two turns (acting in /programs). silent: the client reports nothing "
        "more. ended: the run is over",
        lambda view: view.state, key=_state_sort_key, right=False,
    ),
    Column(
        "TOOL", _TOOL_WIDTH, "tool that runs, as the client reports it or the model called it", _tool,
        right=False,
    ),
    Column(
        "FOR", 5, "since the oldest open request arrived, or the last turn ended",
        lambda view: view.for_s, duration,
    ),
    Column(
        "LEASE", 5,
        "time until the lease on the program's KV ends; due: it ends when no request of the program waits",
        lambda view: view.lease_left_s, lambda left_s: duration(left_s) if left_s > 0 else "due",
        # The lease that ends first comes first; programs without one come last.
        key=lambda view: -(math.inf if view.lease_left_s is None else view.lease_left_s),
    ),
    Column(
        "REUSE", 5, "prompt tokens of all turns that were not computed, because their KV was kept",
        lambda view: view.row.reused_tokens, count,
    ),
    Column("CTX", 5, "tokens of the context", lambda view: view.row.context_tokens, count),
    Column(
        "KV", 9, "where the context's KV is: dev (device, with its size), host, disk; waiting: in no tier",
        _tier, key=lambda view: view.kv_bytes, right=False,
    ),
    Column("TURN", 4, "finished turns", lambda view: view.row.turns, count),
    Column(
        "TTFT", 5, "time to first token of the newest request that has one", lambda view: view.row.ttft_s,
        duration,
    ),
    Column(
        "LOST", 5,
        "prompt tokens of all turns that were computed again: their KV was lost, or the client changed what "
        "came before them",
        lambda view: view.row.lost_tokens, count,
    ),
)  # fmt: skip
"""All columns. LEASE and REUSE, which have the same width, are not shown together."""
SORTABLE = tuple(column.name.lower() for column in COLUMNS if column.name != "TOOL")
"""Names of the columns by which the table can be sorted."""


def column_meanings() -> Table:
    """Return a table of all columns with their meanings."""
    table = Table.grid(padding=(0, 2))
    table.add_row("PROGRAM", "name or agent type of the agent's run, and its id")
    for column in COLUMNS:
        table.add_row(column.name, column.meaning)
    return table


def shows_leases(frame: LiveFrame) -> bool:
    """Return whether the view shows leases: an engine's policy grants them, or a lease exists."""
    return any(
        (engine.grants_leases and not engine.error) or engine.leases or engine.blocks.get("leased")
        for engine in frame.engines
    ) or any(row.lease_blocks for row in frame.programs)


def age_s(row: ProgramRow, frame: LiveFrame) -> float:
    """Return the seconds since the program's last turn ended; ``inf`` if it has no turn yet. While the
    program has a request, the result is negative, and lowest for the newest request."""
    if not (row.turns or row.requests):
        return math.inf
    for_s = program_view(row, {engine.engine: engine for engine in frame.engines}).for_s
    return -1.0 / (1.0 + for_s) if row.requests else for_s


def age_text(row: ProgramRow, frame: LiveFrame) -> str:
    """Return ``age_s`` as text: ``now``, ``no turn yet`` or, for example, ``12s ago``."""
    seconds = age_s(row, frame)
    return "now" if seconds < 0 else "no turn yet" if seconds == math.inf else f"{duration(seconds)} ago"


def sorted_programs(
    frame: LiveFrame, *, sort: str = "state", reverse: bool = False, needle: str = ""
) -> list[ProgramView]:
    """Return the frame's programs that match ``needle``, sorted by the column ``sort``, largest value first.
    For the column ``lease``, the lease that ends first comes first. ``reverse`` reverses the order.

    A program matches if its id, name, tenant, tool, state or engine contains ``needle``, in any letter case.
    Raises ``StopIteration`` if ``sort`` names no column."""
    engines = {engine.engine: engine for engine in frame.engines}
    views = [program_view(row, engines) for row in frame.programs]
    if needle:
        views = [view for view in views if _matches(view, needle.lower())]
    key = next(column.sort_key for column in COLUMNS if column.name.lower() == sort)
    views.sort(key=lambda view: view.row.program_id)
    views.sort(key=key, reverse=not reverse)
    return views


def _matches(view: ProgramView, needle: str) -> bool:
    row = view.row
    words = (row.program_id, row.name, row.tenant, row.tool, view.state, row.engine)
    return any(needle in word.lower() for word in words if word)


# -- lines -----------------------------------------------------------------------------


class TopView:
    """What is shown of a frame in ``width`` columns: the lines above the table, its heading, and one line for
    each program, in the order of the column ``sort``."""

    def __init__(
        self, frame: LiveFrame, width: int, *, url: str = "", sort: str = "state", reverse: bool = False
    ) -> None:
        self.frame = frame
        self.url = url
        self._width = max(MIN_WIDTH, width)
        self._sort = sort
        self._reverse = reverse
        self._leases = shows_leases(frame)
        hidden = "REUSE" if self._leases else "LEASE"
        self._columns = [column for column in COLUMNS if column.name != hidden]
        self._name_width = self._width - sum(column.width + 1 for column in self._columns)

    def sortable(self) -> list[str]:
        """Return the names of the shown columns by which the table can be sorted."""
        return [name for column in self._columns if (name := column.name.lower()) in SORTABLE]

    def page(self) -> list[Text]:
        """Return the lines of the whole view: header, heading and all programs."""
        return [*self.header(), *self.heading(), *self.programs().values()]

    def heading(self) -> list[Text]:
        """Return the table's heading, and a line that stands in for programs while there are none. An arrow
        marks the column by which the table is sorted."""
        cells = [cell("PROGRAM", self._name_width, "bold")]
        for column in self._columns:
            chosen = column.name.lower() == self._sort
            text = column.name + (("▲" if self._reverse else "▼") if chosen else "")
            cells.append(cell(text, column.width, "bold reverse" if chosen else "bold", right=column.right))
        line = Text(" ").join(cells)
        if self.frame.programs:
            return [line]
        what = untracked_text(self.frame) or "no programs yet"
        return [line, Text(cut(f"{what}: sojourn run --url {self.url} -- python agent.py", self._width), DIM)]

    def programs(self, needle: str = "") -> dict[str, Text]:
        """Return id → line of each program that matches ``needle`` (``sorted_programs``)."""
        views = sorted_programs(self.frame, sort=self._sort, reverse=self._reverse, needle=needle)
        return {view.row.program_id: self._program_line(view) for view in views}

    def _program_line(self, view: ProgramView) -> Text:
        row = view.row
        label = row.program_id
        if row.name and cell_len(row.name) + len(label) + 1 <= self._name_width:
            label = f"{row.name} {label}"
        elif row.name and row.name != label:  # the end of a generated id tells programs of one name apart
            label = f"{cut(row.name, self._name_width - 5)} {label[-4:]}"
        styles = {"STATE": STATE_STYLES.get(view.state, ""), "LOST": LOSS if row.lost_tokens else ""}
        cells = [cell(label, self._name_width, DIM if view.state == "ended" else "")]
        for column in self._columns:
            style = styles.get(column.name, "")
            cells.append(cell(column.text(view), column.width, style, right=column.right))
        return Text(" ").join(cells)

    def header(self, *, note: str = "", place: str = "") -> list[Text]:
        """Return the lines above the table: the server's URL and policies, memory by tier as stacked bars,
        number of programs, and tokens. ``note`` and ``place`` (the cursor's place in the table) stand at the
        right end of the first line."""
        engines, width = self.frame.engines, self._width
        slow_s = max((engine.answer_s or 0.0 for engine in engines), default=0.0)
        if not note and slow_s >= SLOW_ANSWER_S:
            note = f"engine answers after {duration(slow_s)}"
        policies = {engine.policy for engine in engines if engine.policy}
        named = ", ".join(sorted(policies - {"observe"} or policies))  # decode engines of pairs only observe
        title = f"sojourn top  {self.url}" + (f"  policy {named}" if named else "")
        right = Text("  ").join(Text(*part) for part in ((note, LOSS), (place,)) if part[0])
        lines = [Text.assemble(cell(title, width - right.cell_len - 2, "bold"), "  ", right)]
        for engine in engines:
            if engine.error:
                lines.append(Text(cut(f"{engine.engine}: {engine.error}", width), LOSS))
        answering = [engine for engine in engines if not engine.error and engine.blocks]
        for label, tiers, block_bytes in _memory(answering):
            for tier, states in tiers.items():
                if not self._leases:
                    states = {name: blocks for name, blocks in states.items() if name != "leased"}
                lines.append(_bar(f"{label}{tier}", states, block_bytes if tier == "device" else 0, width))
        lines += [Text(cut(line, width)) for line in _programs_lines(self.frame, width)]
        return [*lines, _tokens_line(engines, width)]


def untracked_text(frame: LiveFrame) -> str:
    """Return how many requests came without a program; an empty text if none did."""
    number = sum(engine.untracked_requests for engine in frame.engines)
    return f"{number} request{'s' if number > 1 else ''} came without a program" if number else ""


def _memory(engines: Sequence[EngineRow]) -> Iterable[tuple[str, Mapping[str, Mapping[str, int]], int]]:
    if len(engines) <= MAX_BARS:
        for engine in engines:
            label = f"{engine.engine} " if len(engines) > 1 else ""
            yield label, {"device": engine.blocks, **engine.tiers}, engine.block_bytes
        return
    total: dict[str, Counter[str]] = {}
    for engine in engines:
        for tier, states in {"device": engine.blocks, **engine.tiers}.items():
            total.setdefault(tier, Counter()).update(states)
    yield f"{len(engines)} engines ", total, engines[0].block_bytes


def _bar(label: str, states: Mapping[str, int], block_bytes: int, width: int) -> Text:
    total = sum(states.values())
    known = [(name, glyph, style) for name, glyph, style in MEMORY_STATES if name in states]
    legend = " ".join(f"{name} {_percent(states[name], total)}" for name, _, _ in known)
    if block_bytes:
        legend += f" of {size(total * block_bytes)}"
    label = cut(label, 24)
    room = max(10, width - len(label) - len(legend) - 3)
    line = Text.assemble((f"{label} ", "bold"))
    drawn = below = 0
    for name, glyph, style in known:
        below += states[name]
        until = round(room * below / total) if total else 0
        if states[name]:
            until = min(room, max(until, drawn + 1))  # a state with blocks is always visible
        line.append(glyph * max(0, until - drawn), style)
        drawn = max(drawn, until)
    return line.append(" " * (room - drawn) + " " + legend)


def _programs_lines(frame: LiveFrame, width: int) -> list[str]:
    """Return the numbers of programs by state, of requests, and of leases (or of placed programs by tier) as
    text: one line if it fits into ``width``, else two."""
    states = Counter(_state(row) for row in frame.programs)
    words = [f"{states[state]} {state}" for state in _ORDER if states[state]]
    requests = sum(engine.requests for engine in frame.engines)
    running = sum(engine.running_requests for engine in frame.engines)
    leases = sum(engine.leases for engine in frame.engines)
    if not any(engine.blocks for engine in frame.engines):  # this viewer sees programs only
        requests = sum(row.requests for row in frame.programs)
        running = sum(row.running for row in frame.programs)
        leases = sum(row.lease_blocks > 0 for row in frame.programs)
    programs = f"programs {frame.total}" + (f" ({', '.join(words)})" if words else "")
    work = f"requests {running} running, {requests - running} waiting"
    if shows_leases(frame):
        work += f" · leases {leases}"
    elif places := Counter(row.placed for row in frame.programs if row.placed is not None):
        work += f" · placed {', '.join(f'{places[tier]} {tier}' for tier in _PLACES if places[tier])}"
    if frame.total > len(frame.programs):
        work += f" · only {len(frame.programs)} programs shown"
    line = f"{programs} · {work}"
    return [line] if cell_len(line) <= width else [programs, work]


def _tokens_line(engines: Sequence[EngineRow], width: int) -> Text:
    prompt = sum(engine.prompt_tokens for engine in engines)
    reused = sum(engine.device_tokens + engine.host_tokens for engine in engines)
    causes: Counter[str] = Counter()
    for engine in engines:
        causes.update(engine.lost_tokens)
    lost = causes.total()
    if engines and all(engine.error is not None for engine in engines):
        return Text("no engine answers, so there are no totals", DIM)
    if not any(engine.blocks for engine in engines):
        return Text("this key sees no totals of the engines", DIM)
    if not prompt:
        return Text("prompt tokens of programs: none yet", DIM)
    start = f"prompt tokens {count(prompt)}: {_percent(reused, prompt)} reused, "
    again = f"{_percent(lost, prompt)} computed again"
    why = ", ".join(f"{cause} {count(tokens)}" for cause, tokens in causes.most_common() if tokens)
    end = f" ({why})" if why else ""
    end = cut(end, width - len(start) - len(again))
    return Text.assemble(start, (again, LOSS if lost else ""), end)
