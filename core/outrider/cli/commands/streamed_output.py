"""One generation of a command: streamed to people as text, and recorded for scripts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from outrider.cli.options.request_options import EncodedPrompt

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.requests.request import StepOutput
    from outrider.engine.requests.sampling import SamplingParams


_ENOUGH_DRAFTS, _CHANCE = 24, 0.03
"""Minimum number of draft tokens for a judgement of their acceptance, and the accepted share that counts as chance."""


@dataclass(slots=True)
class StreamedOutput:
    """The output of one request so far, and its figures once the request has ended."""

    prompt: EncodedPrompt
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    """Failure of the device that ended the request; the tokens before it are valid."""
    iterations: int = 0
    acceptance_length: float = 0.0
    """Mean number of tokens that one verification yielded."""
    drafted: int = 0
    """Number of draft tokens that were verified."""
    seconds: float = 0.0
    """Time from the request to its last token."""

    @property
    def tokens_per_s(self) -> float:
        """Return the output tokens per second of the whole request, prefill included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def stream(
        self,
        engine: Engine,
        params: SamplingParams,
        write: Callable[[str], object] | None,
        *,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Generate the request's output, and pass text to ``write`` as soon as later tokens can't change it.

        Aborts the request once ``ended`` returns True.
        """
        before = engine.stats
        started = time.perf_counter()
        try:
            # Closed here, not by the garbage collector: an interrupted stream must end its request now.
            outputs = cast("Generator[StepOutput]", engine.stream(self.prompt.tokens, params, media=self.prompt.media))
            with closing(outputs):
                for output in outputs:
                    self.tokens.extend(output.tokens)
                    if output.text is not None:
                        self._append_text(output.text, write)
                    elif write is not None:
                        self._write_token_ids(output.tokens, write)
                    if output.finish_reason is not None:
                        self.finish_reason = str(output.finish_reason)
                    self.error = self.error or output.error
                    if ended():
                        break
        finally:
            self.seconds = time.perf_counter() - started
            after = engine.stats
            self.iterations = after.request_iterations - before.request_iterations
            verified = after.verified_tokens - before.verified_tokens
            self.acceptance_length = verified / self.iterations if self.iterations else 0.0
            self.drafted = after.drafted_tokens - before.drafted_tokens
            if write is not None and self.tokens:
                write("\n")
                sys.stdout.flush()

    @property
    def is_accepted_by_chance(self) -> bool:
        """True if enough draft tokens were verified, and hardly any was accepted."""
        accepted = (self.acceptance_length - 1) * self.iterations
        return self.drafted >= _ENOUGH_DRAFTS and accepted < _CHANCE * self.drafted

    def _write_token_ids(self, tokens: Sequence[int], write: Callable[[str], object]) -> None:
        """Write the ids of the newest ``tokens``; used for a checkpoint without a tokenizer."""
        begin = "" if len(tokens) == len(self.tokens) else ","
        if tokens:
            write(begin + ",".join(map(str, tokens)))
            sys.stdout.flush()

    def _append_text(self, piece: str, write: Callable[[str], object] | None) -> None:
        self.text += piece
        if write is not None and piece:
            write(piece)
            sys.stdout.flush()

    def data(self, engine: Engine) -> dict[str, object]:
        """Return the output, its figures and the device as JSON data."""
        return {
            "text": self.text,
            "token_ids": self.tokens,
            "finish_reason": self.finish_reason,
            **({"error": self.error} if self.error else {}),
            "acceptance_length": self.acceptance_length,
            "iterations": self.iterations,
            "backend": engine.backend.name,
            "device": str(engine.backend.device),
            "tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
        }
