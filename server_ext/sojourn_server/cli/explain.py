"""``sojourn explain``: where the seconds and tokens of one turn of a program went, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from shlex import quote
from typing import Any, Literal

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..metrics.live_frame import ProgramRow
from ..metrics.turn_explanation import NO_TOOL_SEEN, Explanation, grants_no_leases, split_gap
from ..policies.toml_document import did_you_mean
from .cli_error import CliError
from .console import DEFAULT_URL, api_key_option, console, json_option, url_option, write_json
from .live_client import AnswerError, LiveClient
from .top_view import age_s, age_text, count, cut, duration, printable, untracked_text

Program = Mapping[str, Any]
"""A program as ``/sojourn/v1/programs/{id}`` of an engine or a gateway answers."""
_SOURCES: dict[Literal["device", "host", "new", "tail"], str] = {
    "device": "reused",
    "host": "reused, loaded from host memory, disk or another engine",
    "new": "computed for the first time",
    "tail": "in a partial block, which is never kept",
}
_NOT_LOST = {
    "changed": "differ from the previous context; computed again",
    "unread": "computed again, because the request may not read cached KV",
}
"""Note on the tokens that count as ``changed``, which were not lost."""
_DECODING = {"running": "goes on", "prefilled": "at the decode engine, not measured here"}
"""Note on the decoding of turns with these outcomes."""
_CANDIDATES = 5
"""Maximum number of programs that an error or a note lists."""
_TURNS = 8
"""Maximum number of turns that ``reuse_line`` shows."""
_PLACES = {
    "device": "its KV is on the device",
    "host": "its KV is in host memory",
    "disk": "its KV is on disk",
    "waiting": "it waits for memory, and its KV is in no tier",
}
_STATUS_WORDS = {
    "reasoning": "thinking, or waiting in the queue",
    "acting": "its tool runs, or it is idle",
    "gated": "its request is not admitted yet",
    "expired": "silent: the client reports nothing more",
}
"""Status of ``/sojourn/v1/programs`` → meaning, with the state that ``sojourn top`` shows."""
_TURN_HEADING = "TURN QUEUED PREFILL DECODE PROMPT REUSED  LOST WHY, AND BEFORE IT"


def explain(
    program: str = typer.Argument(
        help="Id of the program, its beginning or end, or the program's name, as sojourn top shows them"
    ),
    turn: int | None = typer.Option(None, min=1, help="Number of the turn; without it the newest one"),
    url: str = url_option("The engine or gateway"),
    api_key: str | None = api_key_option("Its API key"),
    json_output: str | None = json_option("the explanation"),
) -> None:
    """Say why a turn of a program took as long as it did."""
    report = console if json_output == "-" else Console()

    def note(line: str) -> None:
        report.print(line, highlight=False, markup=False, soft_wrap=True)

    with closing(LiveClient(url, api_key)) as client:
        found = find_explanation(client, program, turn, note=note)
        if json_output is not None:
            write_json(msgspec.to_builtins(found), json_output)
        if json_output == "-":
            return
        detail = client.find_program(found.program_id)
    report.print(explanation_view(found, detail))
    if found.slowest_turn is not None:
        other_url = "" if url == DEFAULT_URL else f" --url {client.shown_url}"
        note(f"next: sojourn explain {quote(found.program_id)} --turn {found.slowest_turn}{other_url}")
    if detail is None:
        return
    if engine_detail(detail).get("status") or engine_detail(detail).get("outcome"):
        note(f"state: {program_state(detail)}")
    if not _shows_leases(found, detail):
        note(reuse_line(detail))


def find_explanation(
    client: LiveClient, program: str, turn: int | None = None, *, note: Callable[[str], None] | None = None
) -> Explanation:
    """Return the explanation of the turn with number ``turn``. If ``turn`` is ``None``, the newest turn is
    explained. ``program``: an id, the beginning or end of an id, or a name. Of several programs with this
    name, the newest is explained, and ``note`` gets a line that lists the others.

    Raises ``CliError`` if the server knows no such program or turn, or if several ids match."""
    try:
        return client.explanation(program, turn)
    except AnswerError as error:
        if error.status != 404:
            raise
        frame = client.frame()
        rows = frame.programs
        if any(row.program_id == program for row in rows):
            raise
        named = [row for row in rows if row.name == program]
        ids = [id for row in rows if (id := row.program_id).startswith(program) or id.endswith(program)]
        ids = ids or [row.program_id for row in rows if _is_label(program, row)]
        if not named and not ids:
            known = [*dict.fromkeys(row.name or row.program_id for row in rows)]
            untracked = "" if rows else untracked_text(frame)
            hint = f"; {untracked}" if untracked else did_you_mean(program, known)
            next_step = f"sojourn top shows the programs; known: {_listed(known) or 'none'}"
            if untracked:
                next_step = "start the agent with sojourn run, or open sojourn.program() in it; known: none"
            raise CliError(f"no program has the id or name {program!r}{hint}", next_step) from None
    if named:
        newest, *others = sorted(named, key=lambda row: age_s(row, frame))
        if others and note is not None:
            listed = _listed([f"{row.program_id} ({age_text(row, frame)})" for row in others])
            note(printable(f"newest of {len(named)} programs named {program}; others: {listed}"))
        return client.explanation(newest.program_id, turn)
    if len(ids) > 1:
        raise CliError(f"{len(ids)} programs match {program!r}", f"name one by its id: {_listed(ids)}")
    return client.explanation(ids[0], turn)


def _is_label(text: str, row: ProgramRow) -> bool:
    """Return whether ``text`` is the program's label in ``sojourn top``: its name and id, or its id
    alone. Both may be cut."""
    name, _, end = text.strip().rpartition(" ")
    if not name:
        return end.endswith("…") and row.program_id.startswith(end[:-1])
    named = row.name is not None and row.name.startswith(name.rstrip().removesuffix("…"))
    return named and row.program_id.endswith(end)


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:_CANDIDATES], *(["…"] if len(names) > _CANDIDATES else [])])


def reuse_line(program: Program) -> str:
    """Return a line that says how many prompt tokens each of the latest turns reused."""
    turns = [turn for turn in engine_detail(program).get("ledger") or () if turn.get("tokens")]
    parts = []
    for turn in turns[-_TURNS:]:
        tokens = turn["tokens"]
        prompt, reused = tokens.get("prompt") or 0, (tokens.get("device") or 0) + (tokens.get("host") or 0)
        share = f" ({reused / prompt:.0%})" if reused and prompt else ""
        parts.append(f"turn {turn.get('turn', '?')}: {reused:,} of {prompt:,}{share}")
    return f"reused: {'; '.join(parts) or 'no turn has finished yet'}"


def _shows_leases(found: Explanation, program: Program | None) -> bool:
    """Return whether the program's policy grants leases, judged by the server's answers."""
    placed = engine_detail(program or {}).get("placed") is not None
    return found.before.leased_at_return or not (placed or grants_no_leases(found.decisions))


def explanation_view(found: Explanation, program: Program | None = None) -> RenderableType:
    """Return an explanation as a paragraph, a table, and one line for each decision, piece of advice and
    unknown fact. ``sojourn top`` shows the same view. If the policy grants no leases, the view has no leases.
    It then shows the tier in which the policy places the program, if any. ``program``: ``None``: unknown."""
    leases = _shows_leases(found, program)
    paragraph = Text.assemble((printable(found.program_id), "bold"), f": {printable(found.text)}")
    table = Table("where", "seconds", "tokens", "note", box=None, pad_edge=False)
    before, seconds, tokens = found.before, found.seconds, found.tokens
    if before.gap_s is not None:
        note = before.tool or NO_TOOL_SEEN
        note += ("; lease held" if before.leased_at_return else "; no lease") if leases else ""
        table.add_row("gap", f"{before.gap_s:.2f}", "", Text(printable(note)))
        if before.tool_s is not None:
            with_s, without_s = split_gap(before.gap_s, before.tool_s)
            table.add_row("  with a tool", f"{with_s:.2f}", "", "")
            table.add_row("  without", f"{without_s:.2f}", "", "")
    table.add_row("queued", f"{seconds['queued']:.2f}", "", "")
    prompt = f"{tokens['prompt']:,}" if tokens is not None else ""
    table.add_row("prefilling", f"{seconds['prefilling']:.2f}", prompt, "prompt")
    if tokens is not None:
        sources = {name: tokens[name] for name in _SOURCES if tokens[name]}
        for source, count in sources.items():
            table.add_row(f"  {source}", "", f"{count:,}", _SOURCES[source])
        by = "computed again" + (f"; taken by {found.lost_to}" if found.lost_to else "")
        for cause, count in tokens["lost"].items():
            said = f"  {cause}" if cause in _NOT_LOST else f"  lost: {cause}"
            table.add_row(said, "", f"{count:,}", Text(_NOT_LOST.get(cause) or printable(by)))
    ending = _DECODING.get(found.outcome, f"ended: {found.outcome}")
    table.add_row("decoding", f"{seconds['decoding']:.2f}", "", ending)
    lines = []
    place = engine_detail(program or {}).get("placed")
    if not leases and place is not None:
        lines.append(f"place: {place}" + (f" ({_PLACES[place]})" if place in _PLACES else ""))
    lines += found.decision_lines
    for one in found.advice:
        saves = f" Saves about {one.saves_s:.2f} s (estimate)." if one.saves_s else ""
        lines.append(f"{f'hint {one.hint}' if one.hint else 'advice'}: {one.text}{saves}")
    lines += [f"unknown: {text}" for text in found.unknown]
    return Group(paragraph, table, Text("\n".join(map(printable, lines))))


def engine_detail(program: Program) -> Program:
    """Return the engine's part of a program."""
    at_engine = program.get("engine")
    return at_engine if isinstance(at_engine, Mapping) else program


def program_state(program: Program) -> str:
    """Return how a program ended, or its status with the words that ``sojourn top`` uses for it."""
    program = engine_detail(program)
    if program.get("outcome"):
        outcome = printable(str(program["outcome"]))
        return outcome if " " in outcome else f"ended ({outcome})"  # the simulator has a sentence
    status = str(program.get("status"))
    return f"{printable(status)} ({words})" if (words := _STATUS_WORDS.get(status)) else printable(status)


def turn_table(program: Program, last: int = 40) -> str:
    """Return the ``last`` turns of a program as text, one line per turn, newest first."""
    program = engine_detail(program)
    turns = [turn for turn in program.get("ledger") or () if isinstance(turn, Mapping)]
    context = count(program.get("context_tokens") or 0)
    head = f"{program_state(program)}, {program.get('turns')} turns, context of {context} tokens"
    lines = [_turn_line(turn) for turn in turns[: -last - 1 : -1]]
    none = ["no turn has finished yet, or the ledger has forgotten them"]
    return "\n".join([head, "times and tokens of each turn:", "", _TURN_HEADING, *(lines or none)])


def _turn_line(turn: Mapping[str, Any]) -> str:
    seconds, tokens = turn.get("seconds") or {}, turn.get("tokens") or {}
    lost = tokens.get("lost") or {}
    why = [f"on {cut(str(turn['replica']), 16)}"] if turn.get("replica") else []
    why += [f"{cause} {count(number)}" for cause, number in lost.items() if number]
    if turn.get("evictor"):
        why.append(f"taken by {cut(str(turn['evictor']), 24)}")
    if turn.get("preemptions"):
        why.append(f"{turn['preemptions']} preemptions")
    if turn.get("gap_s") is not None:
        why.append(f"{cut(str(turn.get('tool_before') or 'gap'), 16)} {duration(turn['gap_s'])}")
    reused = (tokens.get("device") or 0) + (tokens.get("host") or 0)
    return (
        f"{turn.get('turn', '?'):>4} {duration(seconds.get('queued', 0)):>6}"
        f" {duration(seconds.get('prefilling', 0)):>7} {duration(seconds.get('decoding', 0)):>6}"
        f" {count(tokens.get('prompt') or 0):>6} {count(reused):>6} {count(sum(lost.values())):>5}"
        f" {', '.join(why)}"
    )
