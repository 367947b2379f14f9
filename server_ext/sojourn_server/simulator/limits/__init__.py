"""Bounds for every policy: offline eviction, and eviction orders replayed on the same accesses."""
