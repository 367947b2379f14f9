"""The gateway on a Ray cluster: one coordinator decides for all gateways.

Only this package imports Ray. It also imports ``routing`` and ``gateway.http``. Start with ``coordinator``
(makes the decisions), ``coordinated_routing_backend`` (the coordinator's client in a gateway) and
``deployments`` (what runs on Ray).
"""
