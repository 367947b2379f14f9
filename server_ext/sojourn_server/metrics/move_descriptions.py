"""Words for the moves of placement in the decision log."""

from __future__ import annotations

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
    "futile": "many contexts were lost before their programs returned, so none waits for a place",
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
    "over": "it had ended",
}
"""Reason → why a program left its tier."""


def move_in_words(kind: str, reason: str) -> str:
    """Return what a move of placement did, and why, in words. If this module has no words for the reason, for
    example a reason of a user's policy, return only what the move did. Return an empty string for a decision
    that is not a move."""
    if kind not in _MOVES:
        return ""
    what = "stays on the device" if reason == "kept" else _MOVES[kind]
    why = (_WHY_IN if kind == "to_device" else _WHY_OUT).get(reason)
    return f"{what}: {why}" if why else what
