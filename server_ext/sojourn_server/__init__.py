"""The server side of sojourn: program state, policies, the vLLM adapter and the command line.

Importing this package loads none of torch, vllm and ray. Only the subpackages that need them import them.
"""
