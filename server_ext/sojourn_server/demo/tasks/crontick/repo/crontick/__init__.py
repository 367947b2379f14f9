"""Periodic jobs from one thread."""
