"""Random host programs on an engine of several ranks: its tokens are those of one rank."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

from threads import run

from outrider import Engine
from outrider.engine.ranks.ranks import ParallelConfig, Ranks
from outrider_proof.decode_program import HostProgram, Serving, check_tokens, limited_prefill_graphs
from outrider_proof.engine_setups import MODES, Models, prompt_and_media, random_host_program, reference_tokens
from outrider_proof.proposers import MAKERS

LAYOUTS = (ParallelConfig(tensor=2), ParallelConfig(data=2), ParallelConfig(tensor=2, data=2), ParallelConfig(tensor=4))


@dataclass(frozen=True)
class RankProgram:
    """A host program, and the layout, the proposer and the mode of the engine that serves it."""

    program: HostProgram
    layout: ParallelConfig
    proposer: str
    mode: str

    def serve(self) -> None:
        """Raise :class:`WrongTokens` where the ranks give other tokens than one rank."""
        wanted = [reference_tokens(self.proposer, arrival) for arrival in self.program.arrivals]

        def make(ranks: Ranks) -> Engine:
            return Models(self.proposer, ranks.backend, ranks).engine(self.program, mode=self.mode)

        def lead(engine: Engine) -> Serving:
            serving = Serving([engine], self.program, partial(prompt_and_media, self.proposer))
            serving.step_until_idle()
            return serving

        with limited_prefill_graphs(self.program):  # for all ranks: each of their threads would end it for the others
            served = run(self.layout, make, lead)
        check_tokens(served.tokens, served.ended, wanted)


def drawn(seed: int) -> RankProgram:
    """Layouts and modes in turn; all of both are among the first twelve."""
    layout, mode = LAYOUTS[seed % len(LAYOUTS)], MODES[seed // len(LAYOUTS) % len(MODES)]
    return RankProgram(random_host_program(seed), layout, random.Random(f"ranks {seed}").choice(sorted(MAKERS)), mode)
