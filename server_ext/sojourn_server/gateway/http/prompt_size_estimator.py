"""Estimates a prompt's tokens from its bytes and from earlier counts of engines.

An estimate decides where a request goes, and never causes a rejection.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from .generation_request import GenerationRequest

INITIAL_TOKENS_PER_BYTE = 0.25
"""Tokens per byte of JSON: English has about four characters per token."""
LEAST, MOST = 0.05, 1.0
"""Bounds for any tokenizer."""
MEAN_WEIGHT = 0.1
"""Weight of the newest answer in the moving mean."""
MIN_SAMPLE_BYTES = 2_000
"""In shorter prompts most tokens come from the chat template."""
MAX_MODELS = 64
_INLINE_DATA = re.compile(rb'"data:[^"]*"')
_MEDIA_PARTS = (b'"image_url"', b'"input_image"', b'"input_audio"', b'"audio_url"', b'"video_url"', b'"file"')


class PromptSizeEstimator:
    """Tokens per byte, by model: a moving mean over prompts that engines counted."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[str | None, float] = OrderedDict()

    def tokens(self, question: GenerationRequest) -> int:
        """Estimated prompt tokens, at least 1."""
        if question.prompt_tokens is not None:
            return max(1, question.prompt_tokens)
        return max(
            1, round(_text_bytes(question) * self._ratios.get(question.model, INITIAL_TOKENS_PER_BYTE))
        )

    def told(self, question: GenerationRequest, prompt_tokens: int) -> None:
        """Learn an engine's count."""
        size = question.prompt_bytes
        if question.prompt_tokens is not None or size < MIN_SAMPLE_BYTES or prompt_tokens <= 0:
            return
        # The body lacks earlier turns of a conversation, and an image's bytes do not tell its tokens.
        if question.previous_response_id is not None or _has_more_than_text(question):
            return
        ratio = min(MOST, max(LEAST, prompt_tokens / size))
        known = self._ratios.get(question.model, INITIAL_TOKENS_PER_BYTE)
        self._ratios[question.model] = known + MEAN_WEIGHT * (ratio - known)
        if len(self._ratios) > MAX_MODELS:
            self._ratios.popitem(last=False)


def _has_more_than_text(question: GenerationRequest) -> bool:
    return any(sign in bytes(part) for part in question.prompt for sign in _MEDIA_PARTS)


def _text_bytes(question: GenerationRequest) -> int:
    """Length without files inside the prompt."""
    left_out = 0
    for part in question.prompt:
        text = bytes(part)
        if b'"data:' in text:
            left_out += sum(len(found.group()) for found in _INLINE_DATA.finditer(text))
    return question.prompt_bytes - left_out
