"""Estimates learned from earlier runs on this machine: tool durations, transitions, remaining turns.

This package may import the SDK's events, graphs and listeners. Only ``lifecycle`` imports the advisor. Start
reading at ``advisor``.
"""
