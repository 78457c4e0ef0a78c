"""Stop strings: where a request's text ends, found as the text comes."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.requests.sampling import SamplingParams
from outrider.model import StreamDecoder, Tokenizer


class StopText:
    """The text of a request that ends at a string. Host alone; one request, one thread.

    Text is held back while a stop string may have begun in it. A string is found when the text that completes it is
    certain, which for a character spread over tokens is its last one. Strings that begin in the text of the first
    ``overlook`` tokens aren't looked for.
    """

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str], *, overlook: int = 0) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._overlook = overlook
        self._tokens = 0
        self._held = ""
        self._ready = ""
        self._stopped = False

    def push(self, token: int) -> bool:
        """Add a token; returns whether a stop string is complete. After that, text that follows is lost."""
        self._tokens += 1
        self._add(self._decoder.push(token), self._tokens > self._overlook)
        return self._stopped

    def finish(self) -> bool:
        """The request is over: what was held back counts. Returns whether a stop string was in it after all."""
        if not self._stopped:
            self._add(self._decoder.flush(), self._tokens > self._overlook)
            if not self._stopped:
                self._ready, self._held = self._ready + self._held, ""
        return self._stopped

    def take(self) -> str:
        """The text that has become certain since the last call."""
        text, self._ready = self._ready, ""
        return text

    def _add(self, piece: str, search: bool) -> None:
        self._held += piece
        if not search:
            self._release(len(self._held))
            return
        found = [start for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            self._release(min(found))
            self._held, self._stopped = "", True
        else:
            self._release(len(self._held) - self._begun())

    def _release(self, count: int) -> None:
        self._ready, self._held = self._ready + self._held[:count], self._held[count:]

    def _begun(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = min(max(len(stop) for stop in self._stops) - 1, len(self._held))
        ends = (self._held[len(self._held) - size :] for size in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)


def watch(tokenizer: Tokenizer, params: SamplingParams, output: Sequence[int] = ()) -> StopText:
    """Looks for the stop strings of a request, behind its ``output`` so far."""
    looking = StopText(tokenizer.stream(), params.stop, overlook=params.min_tokens)
    for token in output:
        looking.push(token)
    return looking
