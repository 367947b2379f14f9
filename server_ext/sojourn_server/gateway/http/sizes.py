"""How many tokens a prompt has, before an engine has told: by its bytes, and by what engines told before.

A guess decides where a request goes and never whether: nobody is refused by it.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from .question import Question

FIRST_GUESS = 0.25
"""Tokens a byte of JSON: English has about four characters a token."""
LEAST, MOST = 0.05, 1.0
"""What any tokenizer makes of text."""
WEIGHT = 0.1
"""Of the newest answer in the mean."""
LEAST_BYTES = 2_000
"""Of a shorter prompt most tokens are the chat template's."""
MOST_MODELS = 64
_DATA = re.compile(rb'"data:[^"]*"')
_NO_TEXT = (b'"image_url"', b'"input_image"', b'"input_audio"', b'"audio_url"', b'"video_url"', b'"file"')


class PromptSizes:
    """Tokens a byte, by model: a moving mean over prompts whose size an engine has told."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[str | None, float] = OrderedDict()

    def tokens(self, question: Question) -> int:
        """Expected size of its prompt, at least 1."""
        if question.prompt_tokens is not None:
            return max(1, question.prompt_tokens)
        return max(1, round(_text_bytes(question) * self._ratios.get(question.model, FIRST_GUESS)))

    def told(self, question: Question, prompt_tokens: int) -> None:
        """An engine has said how many there were."""
        size = question.prompt_bytes
        if question.prompt_tokens is not None or size < LEAST_BYTES or prompt_tokens <= 0:
            return
        # What went before is not in the body, and of a picture its bytes say nothing.
        if question.previous_response_id is not None or _has_more_than_text(question):
            return
        ratio = min(MOST, max(LEAST, prompt_tokens / size))
        known = self._ratios.get(question.model, FIRST_GUESS)
        self._ratios[question.model] = known + WEIGHT * (ratio - known)
        if len(self._ratios) > MOST_MODELS:
            self._ratios.popitem(last=False)


def _has_more_than_text(question: Question) -> bool:
    return any(sign in bytes(part) for part in question.prompt for sign in _NO_TEXT)


def _text_bytes(question: Question) -> int:
    """Without files that are spelt out in the prompt."""
    left_out = 0
    for part in question.prompt:
        text = bytes(part)
        if b'"data:' in text:
            left_out += sum(len(found.group()) for found in _DATA.finditer(text))
    return question.prompt_bytes - left_out
