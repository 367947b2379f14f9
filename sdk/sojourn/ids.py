"""Types of the id strings, so that a program id is never passed as a tool name."""

from __future__ import annotations

from typing import NewType

ProgramId = NewType("ProgramId", str)
"""One agent run, first to last LLM request. At most ``MAX_ID_BYTES`` bytes of UTF-8."""

EmitterId = NewType("EmitterId", str)
"""One process's event sender; new after a fork, so that sequence numbers never collide."""

CallId = NewType("CallId", str)
"""One tool call; unique within its program only."""

MAX_ID_BYTES = 256
"""Longest id accepted on the wire, in bytes of UTF-8 (the limit vLLM's router uses)."""
