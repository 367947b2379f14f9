"""The gateway as an HTTP server: routes and proxying around a routing core.

It imports neither vLLM nor Ray. Read ``gateway_app`` (its parts) first, then ``proxy_request`` (one request)
and ``routing_backend`` (the interface to the core).
"""
