"""The gateway as an HTTP server: routes and proxying around a routing core.

May import ``routing``, ``api`` and ``metrics``; never vLLM or Ray. Start with ``gateway_app`` (routes), then
``proxy_request`` (one request), ``routing_backend`` (the core's face) and ``standalone_gateway`` (assembly).
"""
