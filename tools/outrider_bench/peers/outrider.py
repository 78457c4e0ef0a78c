"""The peer Outrider, which generates through its own ``generate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from outrider_bench.load import StreamedAnswer, serve_clients
from outrider_bench.peers.measuring import DraftCounts, Peer, serve_runs
from outrider_bench.peers.work import PeerWork

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.model.layers.tuning import PreparedKernels


class OutriderPeer(Peer):
    """Outrider as one of the compared engines."""

    def __init__(self, engine: Engine, *, settings: str, drafts: bool, tuned_s: float = 0.0) -> None:
        from outrider_bench.limits import quantized_weights
        from outrider_bench.rates import measure_rates

        self.version = version("outrider")
        self.settings = settings
        self.tuned_s = tuned_s
        self._engine = engine
        self._drafts = drafts
        self._rates = measure_rates(engine.backend, engine.model.dtype, weights=quantized_weights(engine))

    def generate(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[int]:
        """Generate tokens with :meth:`Engine.generate`, and return the number of new tokens of each prompt."""
        from outrider.engine.requests.sampling import SamplingParams

        params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in counts]
        made = self._engine.generate(prompts, params)
        return [len(each.token_ids) for each in made]

    def draft_counts(self) -> DraftCounts | None:
        """Return the totals of drafts from :meth:`Engine.stats`; None without drafts."""
        stats = self._engine.stats
        passed = stats.verified_tokens - stats.request_iterations
        return DraftCounts(stats.request_iterations, stats.drafted_tokens, passed) if self._drafts else None

    def stream(self, prompts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[StreamedAnswer]:
        """Run the engine step by step for all prompts, and return the answers."""
        return serve_clients(self._engine, [[request] for request in zip(prompts, counts, strict=True)])

    def limit_ms(self, batch: int, context: float) -> float | None:
        """Return the limit of an iteration by its bytes and operations, in milliseconds; None if the bytes are unknown."""
        from outrider_bench.limits import iteration_cost

        needed = iteration_cost(self._engine, batch=batch, context=context)
        return None if needed is None else 1e3 * self._rates.limit_s(needed)


def open_peer(work: PeerWork, speculate: str, backend: str, options: Mapping[str, Any]) -> OutriderPeer:
    """Open an engine for this work.

    ``options``: ``mode`` and ``prefill_chunk`` (None: the engine chooses), and ``tune_seconds``, the limit of tuning.
    """
    from outrider.cli.options.models import given_settings

    drafts = speculate != "none"
    drafting: dict[str, Any] = {} if drafts else dict.fromkeys(("accept_length", "draft_weights", "draft_vocabulary"))
    model = replace(work.model, speculate=speculate, **drafting)
    found: list[PreparedKernels] = []
    engine = model.load_engine(
        backend,
        settings=given_settings(mode=options["mode"], prefill_chunk=options["prefill_chunk"]),
        max_requests=work.max_requests,
        dtype=work.dtype,
        max_context=work.context,
        cached_tokens=work.cached_tokens,
        tune_seconds=options["tune_seconds"],
        on_prepared=found.append,
    )
    config = engine.config
    launch = f"{config.mode}, {'overlapped' if config.overlap else 'not overlapped'}, chunk {config.prefill_chunk}"
    settings = f"{launch}, {engine.model.kernels.name}, {found[0]}"
    if model.draft_vocabulary is not None:
        settings += f", draft tokens out of {model.draft_vocabulary}"
    settings += "".join(f", the draft's weights in {each.value}" for each in engine.chosen if each.name == "draft_weights")
    result = found[0].result
    return OutriderPeer(engine, settings=settings, drafts=drafts, tuned_s=0.0 if result is None else result.seconds)


def serve(given: Mapping[str, Any]) -> Iterator[Mapping[str, object]]:
    """Serve runs of Outrider; see :func:`~outrider_bench.peers.measuring.serve_runs`."""
    return serve_runs(given, lambda work, _: open_peer(work, given["speculate"], given["backend"], given["options"]))
