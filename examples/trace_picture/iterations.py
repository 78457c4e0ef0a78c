r"""Four overlapped iterations of the bundled model, as ``docs/images/overlap.svg`` shows one of them.

outrider trace --backend sim:kernels=host-plans --out trace.json --picture overlap.svg --from 3606.7 --to 3914 \
    -- examples/trace_picture/iterations.py

The times are virtual and depend on the engine's operations alone. After a change of the engine, set ``--from`` to the first
operation of an iteration's gather, and ``--to`` to a time shortly after the gather of the next iteration.
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
