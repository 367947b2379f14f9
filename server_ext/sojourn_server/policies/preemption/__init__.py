"""Victim and recovery: which running request is preempted, and how does its KV come back?

Protocols ``VictimPolicy`` (``engine``, ``latest-program``, ``most-attained``, ``best-fit``) and
``RecoveryPolicy`` (``recompute``, ``offload``, ``cheaper``).
"""
