"""Shortest routes."""
