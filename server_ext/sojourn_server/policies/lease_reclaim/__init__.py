"""Lease reclaim (``lease_reclaim`` in presets): which leases end early when blocks run short?

Protocol ``LeaseReclaimPolicy``; policies ``latest-program-first``, ``later-programs-first``, ``any-lease``,
``least-wanted-first``.
"""
