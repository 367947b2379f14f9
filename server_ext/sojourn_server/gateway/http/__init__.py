"""The gateway as an HTTP server: routes and proxying around a routing core.

It imports neither vLLM nor Ray. Start with ``gateway_app`` (its parts), then ``proxy_request`` (one request),
``routing_backend`` (the interface to the core) and ``standalone_gateway`` (assembly).
"""
