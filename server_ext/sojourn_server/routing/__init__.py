"""Where requests of many programs go among many replicas: a state machine without I/O and without a clock.

May import ``policies`` and ``programs``, nothing else of the server. Start with ``routing_core``, the one
door (events and ``now`` in, actions out), then ``affinity_core`` (one replica per request) and ``pair_core``
(a prefill and a decode engine per request); ``routing_events`` lists what goes in and comes out.
"""
