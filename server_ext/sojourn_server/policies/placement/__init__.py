"""Placement: in which tier does each program's KV belong?

Protocol ``PlacementPolicy``; policies ``stay``, ``relative-idleness`` (MORI), ``residency-price`` (ours).
"""
