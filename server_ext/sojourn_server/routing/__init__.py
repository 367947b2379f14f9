"""Decides which replica serves each request of many programs: a state machine without I/O and without a
clock.

Imports only ``policies`` and ``programs`` of the server. Start with ``routing_core``, whose ``take`` maps an
event and ``now`` to actions; then ``affinity_core`` (one replica per request) and ``pair_core`` (a prefill
and a decode engine per request). ``routing_events`` lists all events and actions.
"""
