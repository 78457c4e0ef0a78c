"""Drives a Decoder over pages without an engine: what the engine must do, in its plainest form."""

from dataclasses import dataclass, field

import torch

from outrider.device import AttentionMetadata
from outrider.model import ForwardInput, KVCache, StateInput


@dataclass
class Sequence:
    pages: list[int]
    row: int = 0
    length: int = 0
    delta: int = 0  # mrope: what a text position is ahead of the number of tokens
    slots: list[int] = field(default_factory=list)


class Driver:
    """Pages are handed out from both ends alternately, so that a sequence's pages aren't contiguous.

    ``config``: that of a draft head, whose cache it then has.
    """

    def __init__(self, model, *, config=None, pages=64, page_size=4):
        self.config = config = config or model.config
        self.model, self.page_size = model, page_size
        self.device = model.device
        self.free = [
            page for pair in zip(range(1, pages // 2), range(pages - 1, pages // 2, -1), strict=True) for page in pair
        ]
        self.rows = list(range(1, 17))
        self.cache = KVCache.for_model(
            config,
            pages=pages,
            page_size=page_size,
            dtype=model.dtype,
            cache_dtype=model.cache_dtype,
            rows=len(self.rows) + 1,
            device=self.device,
        )

    def sequence(self):
        return Sequence([], 0 if self.config.recurrent is None else self.rows.pop())

    def inputs(self, batch, *, padding=0, positions=None, **extra):
        """ForwardInput of ``batch``, a list of (sequence, new tokens); ``padding`` more tokens at the end."""
        tokens, where, slots, starts, lens = [], [], [], [0], []
        for sequence, new in batch:
            for token in new:
                if sequence.length == len(sequence.pages) * self.page_size:
                    sequence.pages.append(self.free.pop())
                page, offset = divmod(sequence.length, self.page_size)
                slots.append(sequence.pages[page] * self.page_size + offset)
                where.append(sequence.length + sequence.delta)
                tokens.append(token)
                sequence.length += 1
            starts.append(len(tokens))
            lens.append(sequence.length)
        width = max(len(sequence.pages) for sequence, _ in batch)
        table = [sequence.pages + [0] * (width - len(sequence.pages)) for sequence, _ in batch]
        pad = [0] * padding

        def device(values, dtype=torch.int64):
            return torch.tensor(values, dtype=dtype, device=self.device)

        metadata = AttentionMetadata(
            query_start=device(starts, torch.int32),
            seq_lens=device(lens, torch.int32),
            block_table=device(table, torch.int32),
            max_query=max(len(new) for _, new in batch),
            max_kv=max(lens) + 3,
        )
        position = device(where + pad) if positions is None else positions.to(self.device)
        if positions is None and self.config.rope.sections:
            position = position.expand(3, -1).contiguous()
        states = None if self.config.recurrent is None else StateInput(device([each.row for each, _ in batch]))
        return ForwardInput(device(tokens + pad), position, device(slots + pad), metadata, states=states, **extra)

    def hidden(self, batch, **options):
        with torch.no_grad():
            return self.model.forward(self.inputs(batch, **options), self.cache)

    def logits(self, batch, **options):
        with torch.no_grad():
            return self.model.logits(self.hidden(batch, **options))

    def greedy(self, prompt, count, *, chunk=None):
        """Greedy tokens and the logits that chose them, the prompt prefilled in chunks of ``chunk`` tokens."""
        sequence = self.sequence()
        chunk = chunk or len(prompt)
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            extra = {}
            if self.config.rope.kind == "dynamic":
                extra["prompt_lens"] = torch.full((len(part),), len(prompt), device=self.device)
            logits = self.logits([(sequence, part)], **extra)[-1]
        tokens, chosen = [], []
        for _ in range(count):
            chosen.append(logits)
            tokens.append(int(logits.argmax()))
            logits = self.logits([(sequence, tokens[-1:])])[-1]
        return tokens, torch.stack(chosen)
