"""The two small models that need no download: *tiny* for tests, *smol* for the demo.

``resolve_model`` makes them on first use; a path or a hub id passes through.
"""

from .cache import LOCAL_MODELS, ModelError, cache_directory, is_cached, model_directory, resolve_model
from .chat import CHAT_TEMPLATE, assistant_text

__all__ = [
    "CHAT_TEMPLATE",
    "LOCAL_MODELS",
    "ModelError",
    "assistant_text",
    "cache_directory",
    "is_cached",
    "model_directory",
    "resolve_model",
]
