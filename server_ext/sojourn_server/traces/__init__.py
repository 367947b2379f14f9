"""Recorded agent workloads: schema, files, imports, and prompts made from them.

This package imports no other package of ``sojourn_server``. Start reading in ``trace_schema``.
"""
