"""Routing: which replica, or pair of engines, serves a request?

Theory of operation. ``routing_core.RoutingCore`` takes events and returns actions (``routing_events``). It
keeps the replicas, programs and requests (``routing_records``), checks new requests, has silent replicas
probed, and sends the requests of a failed replica to others. Its strategy chooses where a request goes:
``AffinityStrategy`` sends a program's turns to the replica with its KV, ``PairStrategy`` each request to a
prefill and a decode engine. Both ask policies (``policies/routing``, ``policies/fairness``,
``policies/prefill_decode``), which are pure.

A request that no replica has capacity for waits in the strategy's queue, or in its replica's. After each
event the strategy places the waiting requests that fit. If tenants share capacity, ``TenantShares`` says
whose turn it is, and requests without output make way for those of a more urgent tenant.
``program_estimates`` learns the sizes and durations of programs.

What an engine really holds comes from its reports (``KvReported``): programs whose KV is gone lose their
home, and a core that has just started learns homes from them. So a core needs no state of its own to
survive a restart.
"""
