"""Workloads: traces and synthetic programs, in closed or open loops."""
