"""Eviction: in which order are cached blocks reused?

Protocol ``EvictionPolicy``; policies ``lru``, ``latest-program``, ``workflow-aware-lru``, ``typed-labels``.
"""
