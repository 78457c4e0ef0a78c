"""An engine client without an engine: it writes given texts, for tests of what the server makes of a model's output."""

import asyncio
import random

from outrider.engine.requests.request import StepOutput
from outrider.serve.connection.engine_client import EngineClient
from outrider.serve.connection.engine_messages import EngineInfo, RequestAdmitted, SampleOutput, SubmitRequest


class ScriptedEngine(EngineClient):
    """Writes the next of ``texts`` for each request, in pieces of one to four tokens, as drafts bring them."""

    def __init__(self, tokenizer, *, longest=4096):
        super().__init__()
        self.texts, self.prompts, self.tokenizer, self._longest = [], [], tokenizer, longest
        self.stopped_by, self.cached = None, 0

    async def _launch(self):
        info = EngineInfo(
            backend="scripted",
            device="none",
            dtype="float32",
            cache_dtype="float32",
            vocab_size=self.tokenizer.vocab_size,
            bos_token_id=None,
            eos_token_ids=(0,),
            longest_request=self._longest,
            max_requests=4,
            max_logprobs=20,
            page_size=16,
            num_pages=64,
            prefix_cache=True,
            draft_tokens=4,
            image_token=None,
        )
        self._handle([info])

    async def close(self):
        self._end_open_requests(RuntimeError("closed"), expected=True)

    def _send(self, command):
        if not isinstance(command, SubmitRequest):
            return
        self.prompts.append(list(command.tokens))
        text = self.texts.pop(0)
        tokens = self.tokenizer.encode(text) if isinstance(text, str) else list(text)
        limit = command.params.max_tokens
        reason = "stop" if len(tokens) < limit or self.stopped_by is not None else "length"
        tokens = [*tokens, 0] if reason == "stop" and self.stopped_by is None else tokens[:limit]
        rng, events = random.Random(len(text)), [RequestAdmitted(command.key)]
        while tokens:
            size = rng.randint(1, 4)
            piece, tokens = tuple(tokens[:size]), tokens[size:]
            piece_text = self.tokenizer.decode(piece) if command.params.stop else None
            ended = None if tokens else reason
            counts = {"drafted": len(piece) - 1, "proposed": 4, "cached": self.cached}
            stopped_by = None if tokens else self.stopped_by
            output = StepOutput(command.key, piece, ended, searched_text=piece_text, stopped_by=stopped_by, **counts)
            events.append(SampleOutput(command.key, 0, output))
            self.cached = 0
        loop = asyncio.get_running_loop()
        for event in events:
            loop.call_soon(self._handle, [event])
