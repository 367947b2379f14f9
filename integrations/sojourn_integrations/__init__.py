"""Integrations: one file or folder per agent framework.

Each integration imports the SDK, and imports its framework only when needed. Start reading at ``litellm`` or
``langchain``.
"""
