"""Placement: in which tier does each program's KV belong?

``PlacementPolicy``, which is ``stay``; policies ``relative-idleness`` (MORI), ``residency-price`` (ours).
"""
