"""Bounds on recomputation: the offline optimum, and eviction orders replayed on one access sequence."""
