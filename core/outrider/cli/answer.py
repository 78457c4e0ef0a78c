"""One generation of a command: streamed to people, and kept for scripts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from outrider.cli.images import Question
from outrider.cli.sampling_options import logprob_data

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.requests.logprobs import TokenLogprobs
    from outrider.engine.requests.request import StepOutput
    from outrider.engine.requests.sampling import SamplingParams


@dataclass(slots=True)
class Answer:
    """One generation, and what came out of it until now."""

    question: Question
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    iterations: int = 0
    acceptance_length: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """From the request to its last token."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def stream(
        self,
        engine: Engine,
        params: SamplingParams,
        write: Callable[[str], object] | None,
        *,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Generate, giving text to ``write`` as soon as it's certain. Once ``ended`` says so, the request is aborted."""
        decoder = engine.tokenizer.stream() if engine.has_tokenizer else None
        before = engine.stats
        started = time.perf_counter()
        try:
            # Closed here, not by the garbage collector: an interrupted stream must end its request now.
            question = self.question
            outputs = cast("Generator[StepOutput]", engine.stream(question.tokens, params, media=question.media))
            with closing(outputs):
                for output in outputs:
                    self.tokens.extend(output.tokens)
                    self.logprobs.extend(output.logprobs)
                    # With stop strings the engine decides where the text ends.
                    if output.text is not None:
                        self._say(output.text, write)
                    elif decoder is not None:
                        self._say("".join(decoder.push(token) for token in output.tokens), write)
                    elif write is not None:
                        self._write_ids(output.tokens, write)
                    if output.finish_reason is not None:
                        self.finish_reason = str(output.finish_reason)
                    self.error = self.error or output.error
                    if ended():
                        break
            if not params.stop and decoder is not None:
                self._say(decoder.flush(), write)
        finally:
            self.seconds = time.perf_counter() - started
            after = engine.stats
            self.iterations = after.request_iterations - before.request_iterations
            verified = after.verified_tokens - before.verified_tokens
            self.acceptance_length = verified / self.iterations if self.iterations else 0.0
            if write is not None and self.tokens:
                write("\n")
                sys.stdout.flush()

    def _write_ids(self, tokens: Sequence[int], write: Callable[[str], object]) -> None:
        """Token ids as they come, where the checkpoint has no tokenizer; ``tokens`` are the last of them."""
        begin = "" if len(tokens) == len(self.tokens) else ","
        if tokens:
            write(begin + ",".join(map(str, tokens)))
            sys.stdout.flush()

    def _say(self, piece: str, write: Callable[[str], object] | None) -> None:
        self.text += piece
        if write is not None and piece:
            write(piece)
            sys.stdout.flush()

    def data(self, engine: Engine) -> dict[str, object]:
        """What scripts get."""
        return {
            "text": self.text,
            "token_ids": self.tokens,
            **({"logprobs": logprob_data(self.logprobs)} if self.logprobs else {}),
            "finish_reason": self.finish_reason,
            **({"error": self.error} if self.error else {}),
            "acceptance_length": self.acceptance_length,
            "iterations": self.iterations,
            "backend": engine.backend.name,
            "device": str(engine.backend.device),
            "tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
        }
