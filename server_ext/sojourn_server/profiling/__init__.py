"""Measures an engine profile on a live server: prefill and step times, limits, and copy bandwidth.

Imports ``replay``, ``traces``, ``kv_offload``, ``policies`` and ``metrics``. Start at
``prefill_measurement``.
"""
