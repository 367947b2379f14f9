"""The logger of the SDK, which names the sender where nothing else does.

In a process that configures no logging, Python prints a warning without the name of its logger. Then this
logger puts ``sojourn:`` in front, so that a reader of the agent's output knows the sender.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("sojourn")
_SENDER = "sojourn: "


def _name_sender(record: logging.LogRecord) -> bool:
    text = record.msg
    if isinstance(text, str) and not text.startswith("sojourn") and not logger.hasHandlers():
        record.msg = _SENDER + text
    return True


logger.addFilter(_name_sender)
