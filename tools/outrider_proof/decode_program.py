"""Random host programs for the engine, and their service on one engine or on two.

A host program is a batch mix: prompts, lengths, arrivals, aborts, hand-overs between two engines, and engine sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from outrider.device.errors import OutriderError
from outrider.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from outrider import EngineConfig
    from outrider.device import Backend
    from outrider.engine.engine import Engine
    from outrider.engine.guides.grammars import Guidance
    from outrider.engine.requests.draft_length import DraftLengthPolicy
    from outrider.engine.requests.hand_over import ExpectedPages, LentPages
    from outrider.engine.requests.sampling import SamplingParams
    from outrider.model import Decoder, Media
    from outrider.speculative.proposer import Proposer
    from outrider.transports import PageTransfer


_MODULUS = 3


class Residues:
    """A guide that allows each token whose id equals, modulo 3, the sum of all earlier ids plus their number.

    Each token thus decides which tokens may follow. The guide never ends.
    """

    def __init__(self, vocabulary: int) -> None:
        import torch

        from outrider.engine.guides.grammars import mask_of_tokens

        self._tokens: list[int] = []
        rows = [mask_of_tokens(range(residue, vocabulary, _MODULUS), vocabulary) for residue in range(_MODULUS)]
        self._words = torch.stack(rows)

    @property
    def is_complete(self) -> bool:
        """Return False: every output can continue."""
        return False

    @property
    def residue(self) -> int:
        """The residue, modulo the number of classes, that the next token's id must have."""
        return (sum(self._tokens) + len(self._tokens)) % _MODULUS

    def accept(self, token: int) -> bool:
        """Append a token if it is allowed, and return True; return False otherwise."""
        if token % _MODULUS != self.residue:
            return False
        self._tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        """Remove the last ``count`` tokens from the state."""
        del self._tokens[len(self._tokens) - count :]

    def fill(self, words: Tensor, index: int) -> None:
        """Write the bit mask of the tokens that may come next to row ``index`` of ``words`` int32 [N, W]."""
        words[index] = self._words[self.residue]


def check_residues(tokens: Sequence[int]) -> None:
    """Raise :class:`AssertionError` for a token that :class:`Residues` doesn't allow. Shares no code with the engine."""
    for index, token in enumerate(tokens):
        wanted = (sum(tokens[:index]) + index) % _MODULUS
        assert token % _MODULUS == wanted, f"token {index} is {token}, expected a token of residue {wanted} modulo {_MODULUS}"


class ResidueGrammars:
    """A guide compiler for an engine without a tokenizer: it compiles every guide to :class:`Residues`.

    The engine sends such a guide to all ranks and with a hand-over, like any other guide.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def guidance(self, params: SamplingParams, stops: frozenset[int]) -> Guidance:
        """Return the guidance state of a new request."""
        from outrider.engine.guides.grammars import Guidance

        del params, stops
        return Guidance(Residues(self._vocabulary), vocabulary=self._vocabulary)

    @classmethod
    def into(cls, engine: Engine) -> None:
        """Replace the guide compiler of ``engine`` by one of this class."""
        grammars: Any = cls(engine.model.config.vocab_size)
        engine._admission.grammars = grammars


APART = 3
"""Number of turns between what one engine learns and what the other engine does. The one host here stands for two: without
the turns, its knowledge about one engine would also order the other. The order of the engines alternates from move to move.
"""
PATIENCE = 12
"""Number of turns that a moving request waits for pages of the other engine."""


class Network:
    """The two network links between two engines."""

    def __init__(self, first: Engine, second: Engine) -> None:
        from outrider.transports.link import LocalTransport

        self.engines = first, second
        transport = LocalTransport()
        self.links = tuple(
            transport.open(
                engine.page_memory,
                engine.backend,
                accepts=not side,
                host="127.0.0.1",
                states=engine.state_memory,
            )
            for side, engine in enumerate(self.engines)
        )
        for link, other in zip(self.links, reversed(self.links), strict=True):
            link.connect(other.offer())
        self.numbers = count()
        self._arrived: tuple[set[bytes], set[bytes]] = set(), set()

    def has_arrived(self, side: int, notice: bytes) -> bool:
        """Return True once after the notice has arrived at ``side``; callers poll until then."""
        self._arrived[side].update(self.links[side].notices())
        if notice not in self._arrived[side]:
            return False
        self._arrived[side].remove(notice)
        return True

    def close(self) -> None:
        """Close the first link, which ends both sides."""
        self.links[0].close()


class NetworkMove:
    """The move of one request from the engine of ``side`` to the other engine. ``arrive(side, id)`` is called
    after the move.
    """

    def __init__(self, network: Network, side: int, lent: LentPages, arrive: Callable[[int, int], None]) -> None:
        self._network, self._side = network, side
        self._lent, self._arrive = lent, arrive
        self._number = next(network.numbers)
        self._notice = b"%d" % self._number
        self._turns = 0
        self._expected: ExpectedPages | None = None
        self._transfer: PageTransfer | None = None
        self._there = self._back = False

    def _go_back(self, giver: Engine) -> bool:
        """Return the request to its first engine after a timeout, because both engines may wait for each other's pages."""
        giver.lending.returned(self._lent)
        self._arrive(self._side, giver.resume(self._lent.state))
        return True

    def advance(self) -> bool:
        """Advance the move without waiting; return True if the request has arrived and its old pages are free."""
        giver, taker = self._network.engines[self._side], self._network.engines[1 - self._side]
        ours, theirs = self._network.links[self._side], self._network.links[1 - self._side]
        if self._transfer is None:
            self._expected = self._expected or taker.lending.expect(self._lent.state)
            if self._expected is None:
                self._turns += 1
                return self._turns > PATIENCE and self._go_back(giver)
            if not self._lent.ready.done() or not self._expected.free.done():
                return False
            theirs.expect_notice(self._notice, self._expected.written)
            pages = self._expected.pages[: len(self._lent.pages)]
            self._turns = 0
            self._transfer = ours.start_write(self._lent.pages, pages, self._notice, read=self._lent.read)
        assert self._expected is not None
        self._turns += 1
        early, late = self._turns > 0, self._turns > APART
        tells, returns = (late, early) if self._number % 2 else (early, late)
        if tells and not self._there and self._network.has_arrived(1 - self._side, self._notice):
            self._arrive(1 - self._side, taker.lending.arrived(self._expected, self._lent.relay))
            self._there = True
        if returns and not self._back and self._transfer.done():
            giver.lending.returned(self._lent)
            self._back = True
        return self._there and self._back


CONTEXT = 96
"""Maximum context length of the engines, in tokens."""

MAX_OUTPUT_TOKENS = 14
_HANDOVER_FRACTION = 0.3
"""Fraction of programs that hand requests over to another engine."""

_DRAFT_LENGTHS_FRACTION = 0.35
"""Fraction of programs with a schedule of draft lengths."""

_BY_LOAD_FRACTION = 0.2
"""Fraction of programs that choose the draft length by load."""
_BY_REQUEST_FRACTION = 0.5
"""Fraction of programs with a schedule of draft lengths that is a schedule of requests."""
_TOKEN_BUDGET_FRACTION = 0.4
"""Fraction of programs with a small token budget per iteration."""
_EAGER_PREFILL_FRACTION = 0.2
"""Fraction of programs that run every prefill chunk without a graph."""
_MIXED_PREFILL_FRACTION = 0.3
"""Fraction of programs that run small prefill chunks as graphs and larger chunks without."""

_GUIDED_PROGRAM_FRACTION = 0.5
"""Fraction of programs with guided requests."""
_GUIDED_REQUEST_FRACTION = 0.6
"""Fraction of guided requests in such a program."""


class WrongTokens(OutriderError):
    """Raised when an engine's output differs from non-speculative decoding, or when the engine lost a page or a row."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: tokens ``start`` to ``start + length`` of the text, with at most ``max_tokens`` output tokens."""

    start: int
    length: int
    max_tokens: int
    step: int
    """Number of the engine step at which the request arrives."""
    abort_after: int | None
    """Number of steps after the arrival until the client aborts the request; None for no abort."""
    moves: tuple[int, ...] = ()
    """Number of steps after the arrival until each hand-over to the other engine, which happens as soon as possible then."""
    guided: bool = False
    """True if the grammar :class:`~outrider_proof.decode_program.Residues` restricts the output."""

    @property
    def params(self) -> SamplingParams:
        """Greedy sampling parameters of the request, with its guide."""
        from outrider.engine.guides.guides import Regex
        from outrider.engine.requests.sampling import SamplingParams

        return SamplingParams(max_tokens=self.max_tokens, guide=Regex("residues") if self.guided else None)


@dataclass(frozen=True, slots=True)
class HostProgram:
    """A host program: requests, and the sizes of the engine that serves them.

    ``draft_lengths`` are the draft lengths of consecutive iterations, repeated cyclically; empty means the maximum length.
    With ``by_request`` they are those of consecutive requests in all iterations, if the engine can verify these.
    ``by_load`` chooses the draft length by load and acceptance instead, with synthetic costs. ``token_budget`` is the token
    limit of a mixed iteration (decode and prefill tokens); None means a whole prefill chunk in addition to decoding.
    ``prefill_graphs`` is the largest prefill chunk, in tokens, that runs as a graph where decoding does; None: every chunk.
    """

    arrivals: tuple[Arrival, ...]
    max_requests: int
    page_size: int
    spare_pages: int
    prefill_chunk: int
    draft_tokens: int
    draft_lengths: tuple[int, ...] = ()
    by_request: bool = False
    by_load: bool = False
    token_budget: int | None = None
    prefill_graphs: int | None = None

    @classmethod
    def draw(cls, seed: int, text: int) -> HostProgram:
        """Return random program number ``seed`` over a text of ``text`` tokens."""
        rng = random.Random(seed)
        # Separate generators keep the other choices of a program unchanged. Every second move uses the network card.
        moving, changing = random.Random(f"hand-over {seed}"), random.Random(f"draft length {seed}")
        moves = moving.random() < _HANDOVER_FRACTION
        arrivals = []
        for _ in range(rng.randint(1, 4)):
            length = rng.randint(1, 40)
            start = rng.randrange(text - length) if rng.random() < 0.7 else 0  # prompts that share a prefix
            abort = rng.randint(0, 4) if rng.random() < 0.25 else None
            times = tuple(sorted(moving.randint(1, 8) for _ in range(moving.randint(1, 3)))) if moves else ()
            arrivals.append(Arrival(start, length, rng.randint(1, MAX_OUTPUT_TOKENS), rng.randint(0, 4), abort, times))
        program = cls(
            arrivals=tuple(arrivals),
            max_requests=rng.randint(1, 4),
            page_size=rng.choice((2, 4, 16)),
            spare_pages=rng.randint(0, 20),
            prefill_chunk=rng.choice((5, 16, 64)),
            draft_tokens=rng.randint(2, 4),
        )
        guiding = random.Random(f"guide {seed}")
        if guiding.random() < _GUIDED_PROGRAM_FRACTION:
            chosen = [replace(arrival, guided=guiding.random() < _GUIDED_REQUEST_FRACTION) for arrival in program.arrivals]
            program = replace(program, arrivals=tuple(chosen))
        mixing, loading = random.Random(f"mixed {seed}"), random.Random(f"by load {seed}")
        if mixing.random() < _TOKEN_BUDGET_FRACTION:
            # Hardly more tokens than decoding needs, so that a prompt is prefilled in pieces during decoding.
            most = program.max_requests * (program.draft_tokens + 1)
            program = replace(program, token_budget=mixing.randint(max(2, most // 2), most + 6))
        kind = mixing.random()
        if kind < _EAGER_PREFILL_FRACTION + _MIXED_PREFILL_FRACTION:
            size = 0 if kind < _EAGER_PREFILL_FRACTION else mixing.randint(1, max(1, program.prefill_chunk // 2))
            program = replace(program, prefill_graphs=size)
        if loading.random() < _BY_LOAD_FRACTION:
            return replace(program, by_load=True)
        if changing.random() >= _DRAFT_LENGTHS_FRACTION:
            return program
        among = (0, 1, changing.randint(0, program.draft_tokens), program.draft_tokens)
        lengths = [changing.choice(among) for _ in range(changing.randint(2, 7))]
        by_request = random.Random(f"by request {seed}").random() < _BY_REQUEST_FRACTION
        return replace(program, draft_lengths=tuple(lengths), by_request=by_request)

    def config(self, longest: int, **fields: Any) -> EngineConfig:
        """Return a config with the sizes of the program, and pages for a request of ``longest`` tokens and the spare ones.

        ``fields`` are further fields of :func:`~outrider_proof.tiny.plain_config`; overlap is on by default.
        """
        from outrider_proof.tiny import plain_config

        sizes: dict[str, Any] = {
            "max_requests": self.max_requests,
            "page_size": self.page_size,
            "num_pages": 1 + -(-longest // self.page_size) + self.spare_pages,
            "prefill_chunk": self.prefill_chunk,
            "max_context": CONTEXT,
            "overlap": True,
            "token_budget": self.token_budget,
        }
        return plain_config(**sizes | fields)

    def engine(self, target: Decoder, backend: Backend, proposer: Proposer, config: EngineConfig, **options: Any) -> Engine:
        """Return an engine with the prefill graphs and the draft lengths of the program, which compiles each guide to
        :class:`~outrider_proof.decode_program.Residues`.

        ``config`` comes from :meth:`config`. ``options`` are further arguments of :class:`Engine`.
        """
        from outrider.engine.engine import Engine

        with limited_prefill_graphs(self):
            host_lengths = backend.speculative_sync.exact_host_lengths or target.kernels.plans_on_host
            program = replace(self, by_request=self.by_request and not host_lengths and target.ranks.data is None)
            draft_length = draft_length_of(program, proposer)
            engine = Engine(target, backend, proposer=proposer, config=config, draft_length=draft_length, **options)
        ResidueGrammars.into(engine)
        return engine

    def longest(self, proposer: Proposer, *, images: bool) -> int:
        """Return the number of tokens of the longest request, with its output, its draft slots and, with ``images``, its
        image.
        """
        longest = max(arrival.length + arrival.max_tokens for arrival in self.arrivals)
        return longest + max(12, proposer.nodes + 2) + (16 if images else 0)


MOVING = HostProgram(
    arrivals=(
        Arrival(0, 9, 14, 0, None, (2, 6, 8, 9)),
        Arrival(40, 11, 14, 0, None, (1, 4, 6, 8)),
        Arrival(80, 10, 14, 0, None, (2, 7, 8, 9)),
        Arrival(120, 7, 14, 1, None, (3, 5, 7, 8)),
    ),
    max_requests=4,
    page_size=4,
    spare_pages=30,
    prefill_chunk=16,
    draft_tokens=3,
)
"""A program whose requests move between engines by copies and by network: freed pages get new owners at once."""


@contextmanager
def limited_prefill_graphs(program: HostProgram) -> Generator[None]:
    """Limit the prefill graphs of engines built in this scope to ``program.prefill_graphs`` tokens."""
    from outrider.engine import prefill

    tokens = program.prefill_graphs
    with nullcontext() if tokens is None else patch.object(prefill, "max_graph_tokens", lambda _: tokens):
        yield


def draft_length_of(program: HostProgram, proposer: Proposer) -> DraftLengthPolicy | None:
    """Return the policy of the program's draft lengths, limited to the proposer's maximum.

    Returns None for a program without draft lengths, and for a proposer that does not draft chains.
    """
    from outrider.engine.requests.draft_length import DraftCosts, LengthSchedule, LoadDraftLength, default_draft_lengths

    if proposer.is_tree or not proposer.nodes:
        return None
    if program.by_load:
        # The cost of a draft token grows with the batch size, so lengths change with load and with acceptance.
        lengths, sizes = default_draft_lengths(proposer.nodes), range(1, program.max_requests + 1)
        base = {(length, size): 1.0 + 0.2 * size * length for length in lengths for size in sizes}
        return LoadDraftLength(DraftCosts(base))
    if not program.draft_lengths:
        return None
    schedule = [min(length, proposer.nodes) for length in program.draft_lengths]
    widths = range(2, max(schedule) + 2) if program.by_request and proposer.nodes > 1 else ()
    return LengthSchedule(schedule, tuple(widths))


class Serving:
    """The service of one host program, on two engines that hand requests over to each other, or on one engine, which takes a
    request that it handed over itself.

    ``prompt`` returns the tokens and images of an arrival. ``got`` has the output tokens of each request, by its index in the
    program; ``ended`` has its finish reason.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        program: HostProgram,
        prompt: Callable[[Arrival], tuple[tuple[int, ...], tuple[Media, ...]]],
    ) -> None:
        self._engines, self._prompt = engines, prompt
        self._arrivals = program.arrivals
        self._waiting = sorted(range(len(program.arrivals)), key=lambda i: program.arrivals[i].step)
        self._request: dict[int, tuple[int, int]] = {}  # request of the program → engine, id there
        self._index: dict[tuple[int, int], int] = {}  # the inverse; entries stay after a move
        self._since: dict[int, int] = {}
        self._moves = {index: list(arrival.moves) for index, arrival in enumerate(program.arrivals)}
        self.tokens: dict[int, list[int]] = {index: [] for index in self._waiting}
        self.ended: dict[int, str] = {}
        self.moved = 0
        self._network: Network | None = None
        self._under_way: list[NetworkMove] = []

    def step_until_idle(self) -> None:
        """Step the engines until every request has ended and every move is complete."""
        step = 0
        while self._waiting or self._under_way or any(engine.has_unfinished for engine in self._engines):
            self._arrive(step)
            self._under_way = [move for move in self._under_way if not move.advance()]
            for index in [i for i in self._request if i not in self.ended]:
                age = step - self._since[index]
                after = self._arrivals[index].abort_after
                side, request = self._request[index]
                if after is not None and age >= after:
                    with suppress(RequestError):  # already finished: a concurrent hand-over has read its results
                        self._engines[side].abort(request)
                elif self._moves[index] and age >= self._moves[index][0]:
                    self._move(index, side, request)
            for side, engine in enumerate(self._engines):
                for output in engine.step():
                    index = self._index[side, output.request_id]
                    self.tokens[index].extend(output.tokens)
                    if output.finish_reason is not None and output.finish_reason != "hand_over":
                        self.ended[index] = output.finish_reason
            step += 1
        for engine in self._engines:
            engine.drain()
        if self._network is not None:
            self._network.close()

    def _arrive(self, step: int) -> None:
        while self._waiting and self._arrivals[self._waiting[0]].step <= step:
            index = self._waiting.pop(0)
            arrival = self._arrivals[index]
            tokens, media = self._prompt(arrival)
            request = self._engines[0].add_request(tokens, arrival.params, media=media)
            self._place(index, 0, request)
            self._since[index] = step

    def _move(self, index: int, side: int, request: int) -> None:
        is_alone = len(self._engines) == 1
        if not is_alone and (index + len(self._arrivals[index].moves) - len(self._moves[index])) % 2:
            self._move_by_network(index, side, request)
            return
        try:
            handed = self._engines[side].hand_over(request)
        except RequestError:
            return  # still in prefill, or already finished
        self._moves[index].pop(0)
        taker = side if is_alone else 1 - side
        self._place(index, taker, self._engines[taker].take_over(handed))
        self.moved += 1

    def _move_by_network(self, index: int, side: int, request: int) -> None:
        self._network = self._network or Network(*self._engines)
        try:
            lent = self._engines[side].lending.lend(request)
        except RequestError:
            return
        if lent is None:
            return
        self._moves[index].pop(0)
        self.moved += 1
        del self._request[index]

        def arrive(where: int, arrived: int) -> None:
            self._place(index, where, arrived)

        self._under_way.append(NetworkMove(self._network, side, lent, arrive))

    def _place(self, index: int, side: int, request: int) -> None:
        self._request[index] = side, request
        self._index[side, request] = index


def check_tokens(tokens: Mapping[int, Sequence[int]], ended: Mapping[int, str], expected: Sequence[tuple[int, ...]]) -> None:
    """Compare each request's tokens with the expected ones; an aborted request may have only the first of them.

    Raises :class:`WrongTokens`.
    """
    for index, wanted in enumerate(expected):
        got = tuple(tokens[index])
        if got != (wanted[: len(got)] if ended[index] == "abort" else wanted):
            raise WrongTokens(f"request {index} got {list(got)}, non-speculative decoding gives {list(wanted)}")
