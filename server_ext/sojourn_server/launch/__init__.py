"""Builds the command line and environment of a vLLM with the sojourn plugin, and starts and checks its
process.

Imports no vLLM and no torch; the engine runs in a process of its own. Start reading in ``serve_command``.
"""
