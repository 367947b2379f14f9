"""Explains one turn of a program from the turn's ledger record and the decisions about the program.

``explain`` is the one function behind ``sojourn explain``, ``/programs/{id}/explain`` and the web page. Its
numbers are those of the turn ledger and the decision log. Facts that neither of the two contains are listed
under ``unknown``. Seconds that were not measured are marked as estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from .decision_log import DecisionRecord
from .turn_ledger import TurnSeconds, TurnTokens


class _Loss(NamedTuple):
    """A cause of tokens that were computed again, in words."""

    why: str
    """What the tokens did. ``{by}`` names the program whose request took the blocks, if it is known."""
    hint: str | None = None
    advice: str = ""
    """What would have kept the tokens, with the hint that the client may send, if any."""


_LOSSES = {
    "evicted": _Loss("had been lost: evicted{by} while no lease held them"),
    "expired": _Loss("had been lost: evicted{by} after the lease had expired"),
    "silent": _Loss(
        "had been lost: evicted{by} after the lease had ended, because the client stopped its heartbeats",
        "heartbeat",
        "Heartbeats during the tool would have kept the lease.",
    ),
    "pressure": _Loss(
        "had been lost: evicted{by} after the lease had been taken back for another request",
        advice="No hint: another request needed the blocks. More memory or a host tier would have kept them.",
    ),
    "dropped": _Loss(
        "had been lost: dropped at the program's end or by a cache reset",
        "program_end",
        "Send program_end only after the last turn.",
    ),
    "preempted": _Loss("had been lost: the request itself was preempted"),
    "unknown": _Loss("had been lost: the ledger has no cause"),
    "changed": _Loss("differ from the previous context, counted from the block of the first changed token"),
    "unread": _Loss(
        "were computed again, because the request may not read cached KV (prompt_logprobs, or echo with "
        "logprobs)"
    ),
}
NO_TOOL_SEEN = "no tool seen (if one ran, name it: @sojourn.tool)"
"""Note on a gap in which neither the client nor the output named a tool."""
_MOVES = {
    "to_device": "entered the device",
    "to_host": "went to host memory",
    "to_disk": "went to disk",
    "to_waiting": "went off the device to wait",
    "leaves_after_turn": "leaves the device after its turn",
}
"""Kind of a decision → what happened to the program."""
_WHY_IN = {
    "free_capacity": "there was room",
    "overdue": "it had waited for too long",
    "standstill": "it was ready while nothing ran on the device",
    "absent": "it was ready while the tool of a program on the device had run for too long",
    "exchange": "it was ready while the tool of a program on the device ran",
    "kept": "it was to leave after its turn, and may stay",
    "given_up": "the policy failed or was switched off, and all programs are admitted",
}
"""Reason → why a program entered the device."""
_WHY_OUT = {
    "over_capacity": "the KV memory was full",
    "overdue": "a program that had waited for too long needed its place",
    "standstill": "nothing ran, and a ready program needed its place",
    "absent": "its tool had run for too long, and a ready program needed its place",
    "exchange": "its tool ran, and a ready program needed its place",
    "host_full": "a busier program needed its blocks in host memory",
}
"""Reason → why a program left its tier."""
_TERMS = {
    "worth": "weight of the program's progress, 1 for a new program",
    "hold_value": "progress lost per second and block if its KV leaves",
    "price": "progress gained per second and block by the program that enters",
}
"""Terms of the policy ``sojourn`` (docs/policy.md) → meaning."""
_NOT_TERMS = {"seq", "at_s", "kind", "program_id", "reason"}
POLICY_OFF = "policy_off"
"""Reason of a decision not to keep a turn's KV, if the policy grants no leases at all."""
_PREFILLED = "prefilled"
"""Outcome of a turn at the prefill engine of a pair. Its answer is the decode engine's."""
_MIN_SHOWN_S = 0.05
"""Phases of fewer seconds are left out of ``Explanation.text``; ``Explanation.seconds`` has them."""
_ROUNDING_S = 0.001
"""Decisions so little outside a turn are at its edge: its times and theirs are rounded one by one."""


class Advice(msgspec.Struct, frozen=True):
    """What a hint would have changed, or why no hint would have helped. An estimate, not a measurement."""

    hint: str | None
    """Field or call that the client may send; ``None``: no hint would have helped."""
    text: str
    saves_s: float | None = None
    """Estimated seconds of prefill that the hint would have saved; ``None``: unknown, or nothing saved."""


class GapBefore(msgspec.Struct, frozen=True):
    """The gap before a turn."""

    gap_s: float | None
    """Seconds since the previous turn ended; ``None``: there was none."""
    tool: str | None
    leased_at_return: bool
    """Whether a lease held the KV when the request came."""
    tool_s: float | None = None
    """Seconds of the gap in which tools ran, by the client's reports; ``None``: unknown."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds and tokens of one turn went, and why."""

    program_id: str
    turn: int
    outcome: str
    """If ``running``, the turn has not ended, and its numbers are those of now."""
    text: str
    """The explanation in words, one paragraph."""
    before: GapBefore
    seconds: TurnSeconds
    first_token_s: float | None
    usual_first_token_s: float | None
    """Median time to the first token of the program's other turns; ``None``: there are no others."""
    tokens: TurnTokens | None
    """Prompt tokens by source; they add up to ``prompt``. ``None``: the request was never admitted."""
    lost_to: str | None
    """Program whose request took the first missing block; ``None``: unknown or no loss."""
    recompute_s: float | None
    """Estimated seconds that computing the lost tokens again took; ``None``: unknown or no loss."""
    saved_s: float | None
    """Estimated seconds that computing the reused tokens would have taken; ``None``: unknown."""
    decisions: list[DecisionRecord]
    """Decisions about the program from the gap before the turn to the turn's end, with their terms."""
    advice: list[Advice]
    unknown: list[str]
    turns: list[int]
    """Turns that the ledger still has."""
    slowest_turn: int | None = None
    """The program's slowest turn, if its first token took more than twice as long; ``None``: none did."""
    decision_lines: list[str] = []
    """``decisions`` in words, and the meaning of their terms."""
    replica: str | None = None
    """Replica that ran the turn, if a gateway answers."""


class _Turn(NamedTuple):
    """A turn of the ledger, and what is known about it."""

    record: Mapping[str, Any]
    facts: Mapping[str, Any]
    decisions: Sequence[Mapping[str, Any]]
    """Decisions about the program from the gap before the turn to the turn's end."""
    lost: Mapping[str, int]
    recompute_s: float | None
    usual_s: float | None
    """Median time to the first token of the program's other turns; ``None``: there are no others."""

    @property
    def mostly_waited(self) -> bool:
        """Whether most of the time to the first token, or of the turn so far, was spent in the queue."""
        seconds = self.record["seconds"]
        return bool(seconds["queued"] > max(seconds["prefilling"], _MIN_SHOWN_S))


def explain(facts: Mapping[str, Any], turn: int | None) -> Explanation | None:
    """Explain turn number ``turn``; if ``turn`` is ``None``, the newest turn. Returns ``None`` for a turn
    that is not in the ledger.

    ``facts``: an engine's answer to the operation ``program``.
    """
    records: Sequence[Mapping[str, Any]] = [*facts["ledger"], *facts["unfinished"]]
    chosen = [record for record in records if turn is None or record["turn"] == turn]
    if not chosen:
        return None
    record = chosen[-1]
    lost = record["tokens"]["lost"] if record["tokens"] is not None else {}
    known = [s for one in records if one is not record and (s := _first_token_s(one)) is not None]
    slowest_turn, sentence = _slower_turn(record, records)
    begin_s = record["arrived_s"] - (record["gap_s"] or 0.0) - _ROUNDING_S
    end_s = record["arrived_s"] + record["seconds"]["wall"] + _ROUNDING_S
    decisions = [one for one in facts["decisions"] if begin_s <= one["at_s"] <= end_s]
    recompute_s = record["recompute_estimate_s"] if lost else None
    this = _Turn(record, facts, decisions, lost, recompute_s, median(known) if known else None)
    return Explanation(
        program_id=facts["program_id"],
        turn=record["turn"],
        outcome=record["outcome"],
        text=_paragraph(this) + sentence,
        before=GapBefore(record["gap_s"], record["tool_before"], record["leased"], record["tool_s"]),
        seconds=record["seconds"],
        first_token_s=_first_token_s(record),
        usual_first_token_s=round(this.usual_s, 6) if this.usual_s is not None else None,
        tokens=record["tokens"],
        lost_to=record["evictor"],
        recompute_s=recompute_s,
        saved_s=record["saved_estimate_s"],
        decisions=decisions,
        decision_lines=decision_lines(decisions),
        advice=_advice(this),
        unknown=_unknown(this, begin_s),
        turns=[one["turn"] for one in records],
        slowest_turn=slowest_turn,
    )


def decision_lines(decisions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line in words for each decision, and one with the meaning of terms that occur."""
    lines = []
    # A decision with the reason POLICY_OFF is not about this turn: the policy never grants a lease.
    shown = [one for one in decisions if one["reason"] != POLICY_OFF]
    for one in shown:
        terms = "".join(f" {name}={one[name]:g}" for name in one if name not in _NOT_TERMS)
        # A decision of a retention policy with a TTL of 0 grants no lease.
        what = "no lease" if one["kind"] == "keep" and not one.get("ttl_s", 1) else str(one["kind"])
        words = move_in_words(str(one["kind"]), str(one["reason"]))
        name = f"{words} ({what}, {one['reason']})" if words else f"{what} ({one['reason']})"
        lines.append(f"decision {one['seq']}: {name}{terms}")
    if meanings := [f"{name} = {_TERMS[name]}" for name in _TERMS if any(name in one for one in shown)]:
        lines.append(f"terms: {'; '.join(meanings)}")
    return lines


def move_in_words(kind: str, reason: str) -> str:
    """Return what a move of placement did, and why, in words. If this module has no words for the reason, for
    example a reason of a user's policy, return only what the move did. Return an empty string for a decision
    that is not a move."""
    if kind not in _MOVES:
        return ""
    what = "stays on the device" if reason == "kept" else _MOVES[kind]
    why = (_WHY_IN if kind == "to_device" else _WHY_OUT).get(reason)
    return f"{what}: {why}" if why else what


def grants_no_leases(decisions: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether ``decisions`` are those of a policy that grants no leases."""
    return any(one["reason"] == POLICY_OFF for one in decisions)


def _first_token_s(record: Mapping[str, Any]) -> float | None:
    seconds = record["seconds"]
    if not record["output_tokens"] and not seconds["decoding"]:
        return None
    return round(float(seconds["queued"] + seconds["prefilling"]), 6)


def _unknown(turn: _Turn, begin_s: float) -> list[str]:
    record, lost, kept_s = turn.record, turn.lost, turn.facts["decisions_since_s"]
    takes = {"evicted", "expired", "pressure", "silent"}
    whats = {
        "why these tokens were lost: the eviction log no longer has the block": "unknown" in lost,
        "which program took the blocks": record["evictor"] is None and lost.keys() & takes,
        "decisions before the oldest that the log keeps": kept_s is not None and begin_s < kept_s,
        "whether a tool ran before the turn: neither the client nor the output named one": record["gap_s"]
        and record["tool_before"] is None,
    }
    return [what for what, is_unknown in whats.items() if is_unknown]


def split_gap(gap_s: float, tool_s: float) -> tuple[float, float]:
    """Return the seconds of a gap with a tool and those without. They are rounded to hundredths, so that they
    add up to the gap as it is shown. ``tool_s``: seconds in which tools ran."""
    gap_s = round(gap_s, 2)
    with_s = min(round(tool_s, 2), gap_s)
    return with_s, round(gap_s - with_s, 2)


def _paragraph(turn: _Turn) -> str:
    record, seconds, tokens = turn.record, turn.record["seconds"], turn.record["tokens"]
    running = record["outcome"] == "running"
    waited = []
    if seconds["queued"] >= _MIN_SHOWN_S:
        waited = [f"It waited {seconds['queued']:.2f} s in the queue: {_why_it_waited(turn)}"]
    gap = [_gap(turn)] if record["gap_s"] is not None else []
    sentences = [_beginning(turn), *(waited + gap if turn.mostly_waited else gap + waited)]
    if tokens is not None:
        reused = tokens["device"] + tokens["host"]
        sentences.append(
            f"Of {tokens['prompt']:,} prompt tokens {reused:,} were reused and "
            f"{tokens['prompt'] - reused:,} computed in {seconds['prefilling']:.2f} s"
        )
        for cause, count in sorted(turn.lost.items(), key=lambda item: -item[1]):
            why = _LOSSES[cause].why
            if grants_no_leases(turn.decisions):
                why = why.removesuffix(" while no lease held them")
            by = f" by program {record['evictor']}" if record["evictor"] else ""
            sentences.append(f"{count:,} tokens {why.replace('{by}', by)}")
        if turn.recompute_s:
            sentences.append(f"Computing them again took about {turn.recompute_s:.2f} s (estimate)")
    if record["preemptions"]:
        again = record["recomputed_after_preemption_tokens"]
        times = "once" if record["preemptions"] == 1 else f"{record['preemptions']} times"
        sentences.append(f"It was preempted {times} and computed {again:,} tokens again")
    if seconds["decoding"] and running:  # the ledger counts output tokens when the turn ends
        sentences.append(f"It has been decoding for {seconds['decoding']:.2f} s")
    elif seconds["decoding"]:
        sentences.append(f"{record['output_tokens']:,} output tokens took {seconds['decoding']:.2f} s")
    return ". ".join(sentences) + "."


def _beginning(turn: _Turn) -> str:
    """Return how long the turn took to its first token, in words."""
    record, wall_s, first_s = turn.record, turn.record["seconds"]["wall"], _first_token_s(turn.record)
    text = f"Turn {record['turn']}: "
    if record["outcome"] == _PREFILLED:
        return f"{text}its prompt was computed after {wall_s:.2f} s, and a decode engine wrote the answer"
    if first_s is None:
        return f"{text}no token {'yet ' if record['outcome'] == 'running' else ''}after {wall_s:.2f} s"
    usual = (
        f", in the program's other turns {turn.usual_s:.2f} s (median)" if turn.usual_s is not None else ""
    )
    return f"{text}{first_s:.2f} s to the first token{usual}"


def _gap(turn: _Turn) -> str:
    """Return what the time between two turns was spent on, in words."""
    record, gap_s, tool = turn.record, turn.record["gap_s"], turn.record["tool_before"]
    text = f"Before it {gap_s:.2f} s passed" if tool else f"{gap_s:.2f} s passed between the turns"
    if tool and record["tool_s"] is None:
        text += f", in which the tool {tool} ran"
    elif tool:
        with_s, without_s = split_gap(gap_s, record["tool_s"])
        text += f": {with_s:.2f} s with a tool ({tool}) and {without_s:.2f} s without"
    if record["outcome"] == _PREFILLED:
        text += ", the decoding of the last answer included"
    if record["leased"] or not grants_no_leases(turn.decisions):
        text += f", and {'a' if record['leased'] else 'no'} lease held the KV when the request came"
    return text


def _slower_turn(record: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> tuple[int | None, str]:
    """Return the program's slowest turn, and a sentence on it, if its time to first token is more than twice
    that of this turn; else ``None`` and an empty text."""
    slowest = max(records, key=lambda one: _first_token_s(one) or 0.0)
    least_s = max(2.0 * (_first_token_s(record) or record["seconds"]["wall"]), _MIN_SHOWN_S)
    if slowest is record or (_first_token_s(slowest) or 0.0) <= least_s:
        return None, ""
    text = f" The program's slowest turn is turn {slowest['turn']}: {_first_token_s(slowest):.2f} s."
    return slowest["turn"], text


def _why_it_waited(turn: _Turn) -> str:
    """Return why the program was not on the device, and the move that brought it back, in words."""
    record, queued_s = turn.record, turn.record["seconds"]["queued"]
    until_s = record["arrived_s"] + queued_s + _ROUNDING_S
    moves = [one for one in turn.decisions if str(one["kind"]).startswith("to_") and one["at_s"] <= until_s]
    away = next((one for one in reversed(moves) if one["kind"] != "to_device"), None)
    back = moves[-1] if moves and moves[-1]["kind"] == "to_device" else None
    at_once = back is None or back["at_s"] - record["arrived_s"] < queued_s / 2
    if at_once and (back is not None or away is None):
        what = "running requests or for blocks"
        if record["outcome"] == _PREFILLED:
            what = "running requests, for blocks or for KV from storage"
        return f"the policy did not keep it out, it waited for {what}"
    why = "the device had no place for it"
    if away is not None:
        why = f"the policy had moved it, {_decision(away)}"
        if because := _WHY_OUT.get(str(away["reason"])):
            why = f"the policy had taken the program off the device: {because}"
    return f"{why}; it went on by the move {_decision(back)}" if back is not None else why


def _decision(decision: Mapping[str, Any]) -> str:
    """Return a decision and its terms, in words."""
    terms = ", ".join(f"{name} {decision[name]:.3g}" for name in sorted(decision.keys() - _NOT_TERMS))
    return f"{decision['kind']} ({decision['reason']}{'; ' + terms if terms else ''})"


_REFUSED_WITH_A_HINT = {
    "over_budget": "other leases held all that leases may hold (--sojourn-lease-budget)",
    "nothing_cached": "no full block of the context was cached when the lease would have begun",
}
"""Reason of a refused lease → its description. For these reasons, a hinted TTL is refused too."""
_MOVES_AWAY = ("to_waiting", "to_host", "to_disk")


def _advice(turn: _Turn) -> list[Advice]:
    lost, recompute_s = turn.lost, turn.recompute_s
    total = max(1, sum(lost.values()))
    avoidable = sum(lost.values()) - sum(lost.get(one, 0) for one in ("changed", "unread", "unknown"))
    advice: list[Advice] = []
    if turn.mostly_waited and any(one["kind"] in _MOVES_AWAY for one in turn.decisions):
        text = "No hint: it waited for KV memory. More memory, host memory (--kv-host-gib) or fewer programs"
        advice.append(Advice(None, f"{text} at once would have helped."))
    changed_s = (recompute_s or 0.0) * lost.get("changed", 0) / total
    if lost.get("changed") and (recompute_s is None or changed_s >= _MIN_SHOWN_S):
        text = "Do not change earlier messages: everything after the first changed token is computed again."
        advice.append(Advice(None, text, round(changed_s, 6) or None))
    if avoidable:
        saves_s = recompute_s * avoidable / total if recompute_s else None
        if lost.keys() & {"expired", "evicted"}:
            advice += _advice_of_a_lease(turn, saves_s)
        losses = [loss for cause, loss in _LOSSES.items() if cause in lost and loss.advice]
        advice += [Advice(loss.hint, loss.advice, saves_s) for loss in losses]
    elif not advice:
        text = (
            "The cause is unknown." if "unknown" in lost else "Nothing was lost that a hint could have kept."
        )
        if "changed" in lost:
            text += " The changed tokens are no fault of the cache: the client sent a different beginning "
            text += "(a re-tokenised answer or an edited history)."
        advice = [Advice(None, text)]
    return advice


def _advice_of_a_lease(turn: _Turn, saves_s: float | None) -> list[Advice]:
    """Return what a longer lease would have changed, and why the client could have had one or not."""
    record, facts, gap_s = turn.record, turn.facts, turn.record["gap_s"]
    # Only decisions before the turn, because the last decision may be the one at this turn's end.
    before = [one for one in turn.decisions if one["at_s"] <= record["arrived_s"]]
    kept = [one for one in before if "ttl_s" in one and one["turn"] < record["turn"]]
    granted_s = max((float(one["ttl_s"]) for one in kept), default=0.0)
    refused = str(kept[-1]["reason"]) if kept and not granted_s else ""
    if refused == "final_turn":
        text = "Send expected_resume false (final in the SDK) only with the last turn: "
        return [Advice("expected_resume", f"{text}the turn before this one had it, so its KV was not kept.")]
    if grants_no_leases(turn.decisions):
        text = "No hint: this policy grants no leases. More memory or a host tier would have kept it."
        return [Advice(None, text, saves_s)]
    if gap_s is None:
        return []
    was = f"the lease was {granted_s:.2f} s" if granted_s else "no lease was granted"
    was += f" ({refused})" if refused else ""
    most_s, no_hint = facts["max_hinted_ttl_s"], _REFUSED_WITH_A_HINT.get(refused, "")
    if most_s is None:
        no_hint = "this policy does not use hinted TTLs"
    elif not no_hint and gap_s > most_s:
        no_hint = f"the gap of {gap_s:.2f} s is longer than any hinted TTL of this server ({most_s:g} s; "
        no_hint += f"{facts['max_hinted_ttl_from']})"
    if no_hint:
        text = f"No hint: {no_hint}; {was}. More memory or a host tier would have kept it."
        return [Advice(None, text)]
    ttl_s = math.ceil(10 * gap_s) / 10
    text = (
        f"A hinted TTL of {ttl_s:.1f} s or more (kv_retention_ttl_s in the SDK) would have covered the gap "
        f"of {gap_s:.2f} s; {was}. Other requests could not have used its blocks during that time."
    )
    return [Advice("kv_retention_ttl_seconds", text, saves_s)]
