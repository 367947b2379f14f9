"""HTTP routes under ``/sojourn/v1`` and the Prometheus exposition of one API server.

Imports ``core``, ``metrics``, ``programs`` and the SDK, never vLLM. Start reading in ``routes``.
"""
