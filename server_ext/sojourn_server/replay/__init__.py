"""Replay of a recorded workload against a live server, with measurements.

Imports ``traces``, ``programs``, ``metrics`` and the SDK. Start reading in ``replay_driver``.
"""
