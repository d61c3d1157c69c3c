"""Log lines as JSON objects, for machines: one a line."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from enum import Enum

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogFormat(Enum):
    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """Time, level, logger and message; whatever else the line was given as `extra` (a session, a trace, counts); and an
    error with its trace."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in _OWN},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the message, and what else the line was given."""
        extra = (f" {key}={value}" for key, value in vars(record).items() if key not in _OWN)
        return super().formatMessage(record) + "".join(extra)
