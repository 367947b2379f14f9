"""Command line, environment and process of a vLLM with the sojourn plugin.

Imports no vLLM and no torch; the engine runs in a process of its own. Start reading in ``serve_command``.
"""
