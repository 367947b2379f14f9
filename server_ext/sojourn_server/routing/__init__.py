"""A state machine that decides which replica serves each request. It has no I/O and no clock.

It imports only ``policies`` and ``programs`` of the server. Start with ``routing_core``: ``RoutingCore.take``
maps an event and ``now`` to actions. Then read ``affinity_core`` (one replica per request) and ``pair_core``
(a prefill and a decode engine per request). ``routing_events`` defines all events and actions.
"""
