"""The small models *tiny* (tests) and *smol* (demo), made on first use without a download.

This package imports no other package of sojourn. Start reading at ``model_cache.resolve_model``, which also
accepts paths and hub ids.
"""

from .chat_format import CHAT_TEMPLATE, assistant_text
from .model_cache import LOCAL_MODELS, ModelError, cache_directory, is_cached, model_directory, resolve_model

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
