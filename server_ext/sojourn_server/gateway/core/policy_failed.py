"""A policy raised an exception: what was asked of it is left undone, and nothing else."""

from __future__ import annotations


class PolicyFailed(RuntimeError):
    """A question had no answer. The exception that the policy raised is its cause."""
