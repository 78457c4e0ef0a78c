"""The server's log: a line of JSON for each record, or text for people."""

from __future__ import annotations

import json
import logging
import sys
import time


class JsonLines(logging.Formatter):
    """One JSON object a line, ASCII alone: a name or a path of a client can't forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Text(logging.Formatter):
    """The same for people."""

    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        fields = " ".join(f"{name}={value!r}" for name, value in getattr(record, "fields", {}).items())
        text = f"outrider: {record.getMessage()} {fields}".rstrip()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def log_to_stderr(form: str) -> None:
    """Let everything that is logged go to standard error, as ``json`` or ``text``. Replaces what was set before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
