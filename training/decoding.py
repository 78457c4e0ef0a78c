"""Reference implementations of generation and chain drafting, and the detection of loops."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from model import Cache, EagleHead, Target


class Generator:
    """A batched greedy generator for prefixes of equal length. On CUDA one captured graph is replayed per token."""

    def __init__(self, target: Target, batch: int, length: int, temperature: float, dtype: torch.dtype) -> None:
        self.target, self.temperature, self.dtype = target, temperature, dtype
        self.device = target.embed_tokens.weight.device
        self.cache = Cache(target.shape, batch, length, self.device, dtype)
        self.tokens = torch.zeros(batch, length, dtype=torch.long, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def autocast(self) -> torch.autocast:
        half = self.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half, cache_enabled=False)

    def sample(self, hidden: Tensor) -> Tensor:
        logits = self.target.logits(hidden[:, -1]).float()
        if self.temperature == 0.0:
            return logits.argmax(-1)
        probabilities = (logits / self.temperature).softmax(-1)
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)

    def advance(self) -> None:
        """Compute the next token of each row from the token at `position`, write it to the following position and advance
        `position`.
        """
        with self.autocast():
            token = self.tokens.index_select(1, self.position)[:, 0]
            chosen = self.sample(self.target.decode(token, self.position, self.cache))
        self.position += 1
        self.tokens.index_copy_(1, self.position, chosen[:, None])

    @torch.no_grad()
    def run(self, prefix: Tensor, count: int) -> Tensor:
        """Return the rows of `prefix` [B, S] followed by `count` greedy tokens each, [B, S + count]."""
        size = prefix.shape[1]
        was_training = self.target.training
        self.target.eval()
        if self.device.type == "cuda" and self.graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.advance()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.advance()
        self.tokens[:, :size] = prefix
        self.position.fill_(size - 1)
        with self.autocast():
            self.tokens[:, size] = self.sample(self.target(prefix, self.cache))
        self.position.fill_(size)
        for _ in range(count - 1):
            if self.graph is None:
                self.advance()
            else:
                self.graph.replay()
        self.target.train(was_training)
        return self.tokens[:, : size + count].clone()


# -- loops ------------------------------------------------------------------------------------------------


def mark_repeated(tokens: Tensor, longest: int = 128, least: int = 8, enough: int = 20) -> Tensor:
    """Mark the tokens that continue to copy a block after it has been copied once completely.

    A token is marked if, for some period d up to `longest`, the tokens up to it equal those d earlier over a run of at least
    min(max(d, least), enough) tokens.
    """
    size = tokens.shape[1]
    marked = torch.zeros_like(tokens, dtype=torch.bool)
    index = torch.arange(size, device=tokens.device)
    for period in range(1, min(longest, size - 1) + 1):
        differs = tokens[:, period:] != tokens[:, :-period]
        last = torch.where(differs, index[: size - period], -1).cummax(1).values
        run = index[: size - period] - last
        marked[:, period:] |= run > min(max(period, least), enough)
    return marked


def is_loop(tokens: list[int], text: str) -> bool:
    """Return True if a greedy continuation has fallen into a loop.

    Three patterns count as a loop. The end repeats one block of at most 32 tokens at least three times, over at least 24
    tokens. A stripped line of at least 12 characters occurs at least four times. Four consecutive lines are equal and not
    blank.
    """
    for period in range(1, 33):
        span = max(3 * period, 24)
        tail = tokens[-span:]
        if len(tail) == span and all(tail[i] == tail[i - period] for i in range(period, span)):
            return True
    lines = [line.strip() for line in text.split("\n")]
    if any(n >= 4 for line, n in Counter(lines).items() if len(line) >= 12):
        return True
    return any(lines[i] and len(set(lines[i : i + 4])) == 1 for i in range(len(lines) - 3))


def find_loops(rows: list[list[int]], tokenizer: Tokenizer, eos: int) -> list[int]:
    """Return the numbers of the greedy continuations that, up to the token ``eos``, have fallen into a loop."""
    texts = [row[: row.index(eos)] if eos in row else row for row in rows]
    return [number for number, row in enumerate(texts) if is_loop(row, tokenizer.decode(row))]


# -- drafting ---------------------------------------------------------------------------------------------


@torch.no_grad()
def chain_decode(
    target: Target,
    head: EagleHead,
    prompt: list[int],
    count: int,
    depth: int,
    temperature: float,
    eos: int,
    rng: torch.Generator,
) -> tuple[list[int], list[int]]:
    """Decode one sequence speculatively with a chain of `depth` drafts and without a cache.

    Returns the tokens after the prompt and the number of tokens per verification, bonus token included. Decoding is greedy at
    temperature 0, otherwise lossless rejection sampling.
    """
    tokens = list(prompt)
    emitted: list[int] = []

    def probabilities(hidden: Tensor) -> Tensor:
        logits = target.logits(hidden).float()
        if temperature == 0.0:
            return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return (logits / temperature).softmax(-1)

    def sample(p: Tensor) -> int:
        return int(torch.multinomial(p, 1, generator=rng))

    # One target pass over the prompt computes the first token and the hidden states of all positions.
    hidden = target(torch.tensor([tokens]))[0]
    tokens.append(sample(probabilities(hidden[-1])))
    while len(tokens) - len(prompt) < count and tokens[-1] != eos:
        features, drafts, draft_probabilities = hidden, list(tokens), []
        for _ in range(depth):
            embedded = target.embed_tokens(torch.tensor(drafts[1:]))
            out = head(embedded[None], features[None])[0]
            q = probabilities(out[-1])
            draft_probabilities.append(q)
            drafts.append(sample(q))
            features = torch.cat((features, out[-1:]))
        verified = target(torch.tensor([drafts]))[0]
        size = len(tokens)
        accepted = 0
        while accepted < depth:
            p, q = probabilities(verified[size - 1 + accepted]), draft_probabilities[accepted]
            draft = drafts[size + accepted]
            if float(torch.rand((), generator=rng)) * float(q[draft]) >= float(p[draft]):
                new = sample((p - q).clamp_min(0))
                break
            accepted += 1
        else:
            new = sample(probabilities(verified[size - 1 + depth]))
        added = [*drafts[size : size + accepted], new]
        hidden = verified[: size + accepted]
        if eos in added:
            added = added[: added.index(eos) + 1]
        tokens += added
        emitted.append(len(added))
    return tokens[len(prompt) :], emitted


@torch.no_grad()
def mean_acceptance_length(
    target: Target, head: EagleHead, tokens: Tensor, start: int, depth: int, temperature: float
) -> float:
    """Return the mean acceptance length on text that the target generated, with all drafts computed at once.

    Greedy: a chain is accepted up to its first token that differs from the text. Sampling: given that lossless rejection
    sampling emitted x, the probability that x was the accepted draft is min(1, q(x) / p(x)). Drafts count only after accepted
    ones, which equal the text, so drafting along the text is exact in both cases.
    """
    hidden = target(tokens)
    p = target.logits(hidden[:, 1:-1]).float()
    outputs = head.unroll(target.embed_tokens(tokens[:, 1:-1]), hidden[:, :-2], depth)
    following = tokens[:, 2:]
    accepted = []
    for out in outputs:
        q = target.logits(out).float()
        if temperature == 0.0:
            accepted.append(q.argmax(-1) == following)
        else:
            gather = following[..., None]
            log_p = (p / temperature).log_softmax(-1).gather(-1, gather)[..., 0]
            log_q = (q / temperature).log_softmax(-1).gather(-1, gather)[..., 0]
            accepted.append(torch.rand_like(log_p).log() < log_q - log_p)
    hits = [a.cpu().tolist() for a in accepted]
    total = rounds = 0
    last = following.shape[1] - depth - 1
    for row in range(tokens.shape[0]):
        i = start  # the pair that predicts the chain's first draft
        while i < last:
            run = 0
            while run < depth and hits[run][row][i + run]:
                run += 1
            total += run + 1
            rounds += 1
            i += run + 1
    return total / max(1, rounds)
