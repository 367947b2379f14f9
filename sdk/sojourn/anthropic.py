"""Patches Anthropic clients (``anthropic`` ≥ 0.45), for servers that answer ``/v1/messages`` as vLLM does.

Requests for messages carry what those of the ``openai`` client carry; a count of tokens is no turn and stays
unchanged. See ``sojourn.openai``.
"""

from .openai import ClientPackage

_package = ClientPackage("anthropic")
patch, unpatch, wrap = _package.patch, _package.unpatch, _package.wrap
