"""A fake server for tests of agents and integrations (see ``fake_server``)."""

from .fake_server import MODES, FakeServer, LlmRequest, Reply, Script, refusing_url
from .scripted_answers import Answer, ToolUse

__all__ = ["MODES", "Answer", "FakeServer", "LlmRequest", "Reply", "Script", "ToolUse", "refusing_url"]
