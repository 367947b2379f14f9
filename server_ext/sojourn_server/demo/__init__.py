"""``sojourn demo``: the same coding agents on stock vLLM and on sojourn, with forced output tokens.

Imports ``launch``, ``models`` and ``metrics``. Start reading in ``demo_run``.
"""
