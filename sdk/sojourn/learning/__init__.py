"""Estimates learned from earlier runs on this machine: tool durations, transitions, remaining turns.

May import the SDK's events, graphs and listeners; only ``lifecycle`` imports the advisor. Start reading at
``advisor``.
"""
