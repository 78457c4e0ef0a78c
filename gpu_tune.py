# ruff: noqa
"""Tune shapes on a device with the verb of the seam, then time layers as derived and as tuned; one JSON file."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from gpu_tables import layers
from outrider.model.shapes import decoder_shape, shape_config
from outrider_triton.facts import facts_of
from outrider_triton.kernelset import TritonKernels
from outrider_triton.table import load
from outrider_triton.tuned_store import TunedStore, software


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--shapes", default="llama-3.1-8b,qwen3-8b,llama-3.2-1b,qwen2.5-7b,llama-3.1-70b/2")
    arguments = parser.parse_args()
    names = arguments.shapes.split(",")
    shapes = [decoder_shape(shape_config(name), torch.bfloat16) for name in names]
    properties = torch.cuda.get_device_properties(0)
    facts = facts_of(properties)
    kernels = TritonKernels(facts, table=load(properties.name), device=torch.device("cuda", 0))
    directory = Path(tempfile.mkdtemp())
    began, said = time.perf_counter(), []

    def progress(done: int, total: int, text: str) -> None:
        said.append(f"{time.perf_counter() - began:6.1f} s {done}/{total} {text}")
        if "ends of" in text or "library" in text or "wrong" in text:
            print(said[-1], flush=True)

    data: dict = {"device": properties.name, "software": software(), "said": said, "layers": {}}
    results = kernels.tune(shapes, deadline_s=arguments.seconds, directory=directory, progress=progress)
    for name, result in zip(names, results):
        print(name, result, flush=True)
    data["results"] = {name: repr(result) for name, result in zip(names, results)}
    data["rows"] = TunedStore(directory, facts).read()
    arguments.out.write_text(json.dumps(data, indent=1))
    other = TritonKernels(facts, table=load(properties.name))
    print("taken", other.use_tuned(directory), f"after {time.perf_counter() - began:.0f} s", flush=True)
    for name, shape in zip(names, shapes):
        for m in (4, 32, 128):
            found = layers({"shipped": TritonKernels(facts, table=load(properties.name)), "tuned": other}, shape, m, None)
            data["layers"][f"{name}, {m}"] = found
            print(name, m, found, flush=True)
        arguments.out.write_text(json.dumps(data, indent=1))
    print(f"{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
