"""ResponseStore: the responses that later requests continue by ``previous_response_id``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.serve.api.api_errors import ApiError
from outrider.serve.translation.conversation import compact_json

MAX_STORED_RESPONSES = 1024
MAX_STORED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the conversation up to its end."""

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]
    """Items of the input and the output, with those of earlier responses."""
    size: int
    """Length of response and items as JSON text, in bytes."""


class ResponseStore:
    """A store in memory. When it is full, the responses that were used least recently leave it. Use it in one thread."""

    def __init__(self, *, max_responses: int = MAX_STORED_RESPONSES, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size = 0

    def add(self, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Store a response. A response that alone exceeds the limit is not stored."""
        size = len(compact_json([response, items]))
        self._stored[response["id"]] = StoredResponse(response, items, size)
        self._size += size
        while len(self._stored) > self._max_responses or self._size > self._max_bytes:
            self._size -= self._stored.popitem(last=False)[1].size

    def find(self, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a stored response. Raises :class:`ApiError` if there is none; ``param`` is the request field at fault."""
        if response_id not in self._stored:
            message = (
                f"the response {response_id!r} isn't stored: it never was, or newer ones took its place; send the whole "
                "conversation as input"
            )
            code = None if param is None else "previous_response_not_found"
            raise ApiError(404 if param is None else 400, message, param=param, code=code)
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def remove(self, response_id: str) -> None:
        """Remove a stored response. Raises :class:`ApiError` if there is none."""
        self._size -= self.find(response_id).size
        del self._stored[response_id]
