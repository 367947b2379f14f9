"""The logger of the SDK. It puts ``sojourn:`` in front of each message if the process configures no logging.

Without that configuration, Python prints a warning without the logger's name. The prefix names the sender.
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
