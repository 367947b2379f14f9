"""Routing: which replica serves a request, when does it move, and which waiting request is routed first?

Protocols ``RoutingPolicy`` (``random``, ``round-robin``, ``prefix-affinity``, ``session-affinity``,
``room-for-all``, ``least-delay``), ``StealingPolicy`` (``none``, ``work-stealing``) and
``WaitingOrderPolicy`` (``waiting_order`` in presets: ``arrival``, ``idleness``, ``largest-first``).
"""
