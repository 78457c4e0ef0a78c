"""Formats of the server's log: one JSON object per line, or text for people."""

from __future__ import annotations

import json
import logging
import sys
import time


class JsonFormatter(logging.Formatter):
    """A formatter that writes one JSON object per line, in ASCII: data of a client can't forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON: time, level, event, the record's ``fields`` and its traceback."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{at}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A formatter that writes the message and the record's ``fields`` as text for people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, with the traceback of an error on further lines."""
        fields = " ".join(f"{name}={value!r}" for name, value in getattr(record, "fields", {}).items())
        text = f"outrider: {record.getMessage()} {fields}".rstrip()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def log_to_stderr(form: str) -> None:
    """Write all log records to standard error. ``form`` is ``json`` or ``text``. Replaces the handlers of the root logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
