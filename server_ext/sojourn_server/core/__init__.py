"""Decisions of one engine's scheduler: events in, actions out; leases, admission, tiers.

This package imports ``programs``, ``policies``, ``metrics`` and the SDK. It uses no engine and no clock.
Start reading at ``program_scheduler.py``.
"""
