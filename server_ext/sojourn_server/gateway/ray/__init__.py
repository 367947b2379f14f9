"""The gateway on a Ray cluster: one coordinator decides for all gateways.

Only this package imports Ray; it may import ``routing`` and ``gateway.http``. Start with ``coordinator`` (the
deciding side), ``coordinated_routing_backend`` (a gateway's side) and ``deployments`` (what runs on Ray).
"""
