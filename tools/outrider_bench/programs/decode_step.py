"""The target's forward of one decode step at the Llama-3.1-8B shape, random weights, in a graph: milliseconds of device time.

    python -m outrider_bench.programs.decode_step [--tokens 1,4] [--batch 1,8,32] [--context 640] [--kernels tuned]

Each combination of a batch and a number of tokens a request is timed on its own, the output head included.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import TYPE_CHECKING

import torch

from outrider.device import AttentionMetadata
from outrider.model import ForwardInput, KVCache
from outrider_bench.random_weights import random_decoder, shape_config

if TYPE_CHECKING:
    from outrider.device import Backend, CaptureContext
    from outrider.model import Decoder

PAGE = 16
"""Tokens a page of the KV cache holds."""


def inputs_for(model: Decoder, batch: int, width: int, context: int) -> tuple[ForwardInput, int]:
    """Inputs of one step, ``width`` tokens for each of ``batch`` requests of ``context`` tokens, and the pages they need."""
    device, rows = model.device, batch * width
    per = context // PAGE + 1
    table = (torch.randperm(batch * per, device=device) + 1).view(batch, per).to(torch.int32)
    lane = torch.arange(context - width, context, device=device)
    metadata = AttentionMetadata(
        query_start=torch.arange(0, rows + 1, width, dtype=torch.int32, device=device),
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=device),
        block_table=table,
        max_query=width,
        max_kv=context,
    )
    slots = (table[:, lane // PAGE].to(torch.int64) * PAGE + lane % PAGE).flatten()
    tokens = torch.randint(0, model.config.vocab_size, (rows,), device=device)
    return ForwardInput(tokens, lane.repeat(batch), slots, metadata), batch * per + 1


def time_step(backend: Backend, model: Decoder, batch: int, width: int, context: int, replays: int = 20) -> float:
    """The median of the step's device time, in milliseconds."""
    stream = backend.create_stream("step")
    with backend.on(stream):
        inputs, pages = inputs_for(model, batch, width, context)
        config = model.config
        cache = KVCache.allocate(
            config.num_layers,
            config.num_kv_heads,
            config.head_size,
            pages=pages,
            page_size=PAGE,
            dtype=model.dtype,
            device=backend.device,
        )
        logits = torch.empty(batch * width, config.vocab_size, dtype=model.dtype, device=backend.device)
    stream.synchronize()

    def step(context: CaptureContext) -> None:
        context.outputs["logits"].copy_(model.logits(model.forward(inputs, cache)))

    graph = backend.capture("step", step, stream=stream, inputs={}, outputs={"logits": logits})
    times = []
    for _ in range(replays + 3):
        start, end = (backend.create_event(name, timing=True) for name in ("start", "end"))
        stream.record(start)
        graph.replay(stream)
        stream.record(end)
        stream.synchronize()
        times.append(start.elapsed_ms(end))
    assert logits.isfinite().all()
    return statistics.median(times[3:])


def main() -> None:
    """Parse the options, measure, print a JSON object for each combination."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", default="1,4")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--kernels", default="tuned,torch")
    arguments = parser.parse_args()
    from outrider.registry import get_backend

    for kernels in arguments.kernels.split(","):
        backend = get_backend("cuda" if kernels == "tuned" else f"cuda:kernels={kernels}")
        model = random_decoder(shape_config("llama-3.1-8b"), backend=backend, dtype=torch.bfloat16)
        for batch in arguments.batch.split(","):
            for width in arguments.tokens.split(","):
                ms = time_step(backend, model, int(batch), int(width), arguments.context)
                row = {"kernels": kernels, "batch": int(batch), "tokens": int(width), "ms": round(ms, 3)}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
