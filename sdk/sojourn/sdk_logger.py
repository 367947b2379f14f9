"""The logger of the SDK. It puts ``sojourn:`` in front of each message if the process configures no logging.

Python then prints a warning without the name of its logger, and a reader of the agent's output would not know
the sender.
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
