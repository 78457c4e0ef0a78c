r"""A few overlapped iterations of the bundled model, to be drawn:

outrider trace --backend sim:kernels=host-plans --out trace.json --picture overlap.svg --from 3598.6 --to 3906 \
    -- tools/outrider_bench/programs/overlap_trace.py

The times are virtual: they change with the engine's operations alone. ``--from`` and ``--to`` are then set anew, to the first
operation of an iteration's gather and a little behind that of the next.
"""

from pathlib import Path

import outrider
from outrider import Engine, EngineConfig, SamplingParams
from outrider.registry import get_backend

BUNDLED = Path(outrider.__file__).parent / "bundled"
REQUESTS = 4

engine = Engine.from_checkpoint(
    BUNDLED / "target",
    get_backend("sim:kernels=host-plans"),
    draft_dir=BUNDLED / "eagle",
    speculate="eagle",
    config=EngineConfig(
        max_requests=REQUESTS,
        max_context=128,
        prefill_chunk=256,
        dtype="float32",
        mode="staged",
        overlap=True,
        graphs=True,
        buckets=(REQUESTS,),
    ),
)
prompts = [engine.tokenizer.encode(text) for text in ("def read(self", "class Parser:", "import os\n", "return self.")]
engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
