"""How many tokens a prompt has, before an engine has told: by its bytes, and by what engines told before."""

from __future__ import annotations

from collections import OrderedDict

from .question import Question

FIRST_GUESS = 0.25
"""Tokens a byte of JSON: English has about four characters a token."""
WEIGHT = 0.05
"""Of the newest answer in the mean."""
MOST_MODELS = 64


class PromptSizes:
    """Tokens a byte, by model: a moving mean over prompts whose size an engine has told."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[str | None, float] = OrderedDict()

    def tokens(self, question: Question) -> int:
        """Expected size of its prompt, at least 1."""
        if question.prompt_tokens is not None:
            return max(1, question.prompt_tokens)
        return max(1, round(question.prompt_bytes * self._ratios.get(question.model, FIRST_GUESS)))

    def told(self, question: Question, prompt_tokens: int) -> None:
        """An engine has said how many there were."""
        if question.prompt_tokens is not None or question.prompt_bytes <= 0 or prompt_tokens <= 0:
            return
        ratio = prompt_tokens / question.prompt_bytes
        known = self._ratios.get(question.model)
        self._ratios[question.model] = ratio if known is None else known + WEIGHT * (ratio - known)
        if len(self._ratios) > MOST_MODELS:
            self._ratios.popitem(last=False)
