"""Metrics, the decision log and the turn ledger of one engine.

Imports ``programs`` and ``policies``. Start at ``metric_catalog`` (the list of all metrics) and
``metrics_recorder``.
"""
