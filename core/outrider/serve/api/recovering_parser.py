"""transformers' response parser, which reads on after a part of the text that it can't read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils.chat_parsing import ResponseParser


class RecoveringParser(ResponseParser):
    """A parser whose events don't depend on how the text is cut into pieces, and that loses no text.

    An event ``region_close`` has the text of its region, with delimiters, as ``raw``. If the region can't be read, the event
    is ``region_failed`` instead.
    """

    def __init__(self, template: Mapping[str, Any], prompt: str, tools: list[dict[str, Any]]) -> None:
        self._region_start = self._text_start = 0
        super().__init__(dict(template), prefix=prompt, tools=[*tools])
        self._text_start = len(self._buffer)

    def finish(self) -> list[dict[str, Any]]:
        """Parse the end of the text and return the last events. An open region is closed, and its event is among them."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        self._region_start = m.start()
        super()._open_explicit(events, field, m)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        name, is_explicit, num_events = self._current, self._current != self._implicit_name, len(events)
        try:
            super()._close_current(events)
            kind = "region_close"
        except Exception:  # a model may write text that doesn't match its template, in any way
            self._reset_to_implicit()
            kind = "region_failed"
        if is_explicit:
            raw = self._buffer[max(self._region_start, self._text_start) : self._pos]
            value = events[-1]["value"] if kind == "region_close" else None
            events[num_events:] = [{"type": kind, "field": name, "value": value, "raw": raw}]
