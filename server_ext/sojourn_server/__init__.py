"""The server side of sojourn: program state, policies, the vLLM adapter and the command line.

Importing this package loads neither torch, vllm nor ray; only the rooms that name an engine do.
"""
