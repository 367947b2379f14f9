"""Builds the command line of a vLLM server with the sojourn plugin, starts its process and checks it.

Imports neither vLLM nor torch: the engine runs in a process of its own. Start reading in ``serve_command``.
"""
