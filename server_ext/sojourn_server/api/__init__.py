"""HTTP routes under ``/sojourn/v1`` and the Prometheus exposition of one API server.

Imports ``core``, ``metrics`` and the SDK's wire formats, never vLLM. Start reading in ``routes``.
"""
