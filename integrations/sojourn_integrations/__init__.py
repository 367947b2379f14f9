"""Integrations: one file or folder per agent framework.

Each imports the SDK, and its framework only when needed. Start reading at ``litellm`` or ``langchain``.
"""
