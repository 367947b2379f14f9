"""Decisions of one engine's scheduler: events in, actions out; leases, admission, tiers.

Imports ``programs``, ``policies``, ``metrics`` and the SDK; no engine and no clock. Start with
``program_scheduler.py``.
"""
