"""Integrations: one file or folder per agent framework.

Each imports the SDK and, lazily, its framework. Start reading at ``litellm`` or ``langchain``.
"""
