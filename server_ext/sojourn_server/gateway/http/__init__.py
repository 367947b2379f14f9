"""The gateway as an HTTP server: routes and proxying around a routing core.

Imports ``routing``, ``api`` and ``metrics``; never vLLM or Ray. Start with ``gateway_app`` (routes), then
``proxy_request`` (one request), ``routing_backend`` (the interface to the core) and ``standalone_gateway``
(assembly).
"""
