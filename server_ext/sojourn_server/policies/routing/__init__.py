"""Routing and stealing: which replica serves a request, and when does it move?

Protocols ``RoutingPolicy`` (``random``, ``round-robin``, ``prefix-affinity``, ``session-affinity``,
``room-for-all``, ``least-delay``) and ``StealingPolicy`` (``none``, ``work-stealing``).
"""
