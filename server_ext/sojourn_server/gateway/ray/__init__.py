"""The gateway on a Ray cluster: one coordinator decides for all gateways.

No other package imports Ray. This one imports ``routing`` and ``gateway.http``. Start with ``coordinator``
(which decides), ``coordinated_routing_backend`` (its client in a gateway) and ``deployments`` (what runs on
Ray).
"""
