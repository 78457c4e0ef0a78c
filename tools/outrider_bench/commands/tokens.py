"""``outrider bench tokens``: greedy tokens with speculation against those without, and how fast both come."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module, resources
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.inputs import read_utf8
from outrider.cli.models import (
    DraftTokensOption,
    DtypeOption,
    KvMemoryOption,
    MaxContextOption,
    PageSizeOption,
    Running,
    Sizes,
    Speculation,
    bundled,
    launched,
    load,
)
from outrider.cli.report import BackendOption, JsonOption, Report
from outrider.device.errors import ConfigError
from outrider_bench.engines import check_room
from outrider_bench.launch_options import GraphsOption, ModeOption, OverlapOption, PrefillChunkOption

if TYPE_CHECKING:
    from outrider.cli.differences import Difference
    from outrider.engine.engine import Engine

_LENGTHS = (20, 160)
_SHOWN = 20


def tokens(
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 32,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", metavar="F.json", help='A file {"prompts": [{"text": …}]} instead of built-in text.'),
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, metavar="N", help="New tokens of each.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode together when tokens are compared.")] = 8,
    timed: Annotated[int, typer.Option(min=0, help="Prompts that are timed, one after the other; 0: none.")] = 8,
    draft_tokens: DraftTokensOption = 4,
    dtype: DtypeOption = None,
    mode: ModeOption = None,
    graphs: GraphsOption = None,
    overlap: OverlapOption = None,
    max_context: MaxContextOption = None,
    kv_memory: KvMemoryOption = None,
    page_size: PageSizeOption = None,
    prefill_chunk: PrefillChunkOption = None,
    transformers: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Time transformers on the same checkpoint too.")
    ] = True,
    backend: BackendOption = None,
    json_output: JsonOption = False,
) -> Report:
    """Decode prompts greedily with the bundled head and without, and compare: tokens, and tokens a second.

    In exact arithmetic both are equal. In floating point a verification adds up in another order than a single step, so
    where two logits are within rounding of each other either may win; each such place is shown with the gap. The text of the
    prompts is Outrider's own source, which the bundled model has never seen.
    """
    from outrider.cli.torch_probe import require_torch

    require_torch()
    from outrider.cli.differences import PrefillComparison
    from outrider.engine.config import Choice

    beside = [Choice("max_requests", batch, "--batch")]
    if dtype is None:
        dtype = "float32"
        beside.append(Choice("dtype", dtype, "tokens are compared, and coarser rounding makes others"))
    running = Running(mode=mode, graphs=graphs, overlap=overlap)
    sizes = Sizes(max_context=max_context, kv_memory=kv_memory, page_size=page_size, prefill_chunk=prefill_chunk)
    speculation = Speculation.choose("eagle", model=None, draft=bundled("eagle"), draft_tokens=draft_tokens)
    # The same prompts are compared and then timed: a cached prefix would shorten the second.
    start = partial(load, backend, max_requests=batch, dtype=dtype, running=running, sizes=sizes, prefix_cache=False)
    engine = start(speculation, say=not json_output, command_choices=beside)
    plain = start(speculation.without())
    given = _texts(prompt_file, prompts, engine)
    if not given:
        raise ConfigError(f'{prompt_file}: no prompts in it; expected {{"prompts": [{{"text": "…"}}]}}')
    longest = max(map(len, given))
    for each in (engine, plain):
        check_room(each, f"the {longest} tokens of a prompt and --new-tokens {new_tokens}", longest + new_tokens)
    ours, theirs = ([done.token_ids for done in _decode(each, given, new_tokens)] for each in (engine, plain))
    differing = [index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    comparison = PrefillComparison(plain) if differing else None
    looks = (
        [comparison.compare(given[index], ours[index], theirs[index], number=index) for index in differing]
        if comparison
        else []
    )
    differences = [look for look in looks if look is not None]
    speeds = _speeds(engine, plain, given[:timed], new_tokens, transformers) if timed else []
    data: dict[str, object] = {
        "backend": engine.backend.name,
        "device": str(engine.backend.device),
        "versions": dict(engine.backend.versions()),
        "kernels": engine.model.kernels.name,
        "model": "bundled",
        "draft_tokens": draft_tokens,
        **launched(engine, beside),
        "batch": batch,
        "prompts": len(given),
        "new_tokens": new_tokens,
        "differ": len(differing),
        "differ_fraction": len(differing) / len(given),
        "differences": [asdict(each) for each in differences],
        "speed": speeds,
    }
    return Report(data=data, render=lambda console: _render(console, data, differences, speeds))


def _texts(file: Path | None, count: int, engine: Engine) -> list[list[int]]:
    """Token ids of the prompts: from a file, or slices of source code."""
    tokenizer = engine.tokenizer
    if file is not None:
        read = read_utf8(file, "prompts")
        try:
            texts = [str(each["text"]) for each in json.loads(read)["prompts"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f'{file}: {type(error).__name__}: {error}; expected {{"prompts": [{{"text": "…"}}]}}') from None
        return [tokenizer.encode(text) for text in texts[:count]]
    sources = sorted(Path(str(resources.files("outrider").joinpath("engine"))).glob("*.py"))
    ids = [token for source in sources for token in tokenizer.encode(source.read_text(encoding="utf-8"))]
    draw = random.Random(count)
    lengths = [draw.randint(*_LENGTHS) for _ in range(count)]
    return [ids[start : start + length] for length in lengths for start in [draw.randrange(len(ids) - length)]]


def _decode(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Any]:
    from outrider.engine.requests.sampling import SamplingParams

    return engine.generate(prompts, SamplingParams(max_tokens=new_tokens, ignore_eos=True))


def _speeds(
    engine: Engine, plain: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, transformers: bool
) -> list[dict[str, object]]:
    """Tokens a second, prompts one after the other, prefill included; the first prompt has run once before."""
    rows: list[dict[str, object]] = []
    for name, each in (("speculation", engine), ("plain", plain)):
        _decode(each, prompts[:1], new_tokens)
        before = each.stats
        began = time.perf_counter()
        for prompt in prompts:
            _decode(each, [prompt], new_tokens)
        seconds = time.perf_counter() - began
        after = each.stats
        verified = after.verified_tokens - before.verified_tokens
        rows.append(
            {
                "engine": "outrider",
                "decoding": name,
                "tokens_per_s": len(prompts) * new_tokens / seconds,
                "acceptance_length": verified / (after.request_iterations - before.request_iterations),
            }
        )
    if transformers:
        rows.append(_transformers(plain, prompts, new_tokens))
    return rows


def _transformers(plain: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, object]:
    """``generate`` on the same checkpoint, device and dtype, with the cache that it takes by default."""
    import torch

    module: Any = import_module("transformers")
    device = plain.backend.device
    name, dtype = bundled("target"), plain.model.dtype
    model = module.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False).to(device).eval()
    model.generation_config.eos_token_id = None

    def generate(prompt: Sequence[int]) -> None:
        ids = torch.tensor([list(prompt)], device=device)
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
        )
        made.tolist()  # it's over when the host has it

    generate(prompts[0])
    began = time.perf_counter()
    for prompt in prompts:
        generate(prompt)
    seconds = time.perf_counter() - began
    return {
        "engine": f"transformers {version('transformers')}",
        "decoding": "plain",
        "tokens_per_s": len(prompts) * new_tokens / seconds,
        "acceptance_length": 1.0,
    }


def _render(
    console: Console, data: Mapping[str, Any], differences: Sequence[Difference], speeds: Sequence[Mapping[str, Any]]
) -> None:
    console.print(
        f"bundled model on {data['backend']} ({data['device']}), {data['dtype']}, {data['mode']}, {data['prompts']} prompts, "
        f"{data['new_tokens']} new tokens, {data['draft_tokens']} draft tokens, batch {data['batch']}"
    )
    share = 100 * data["differ_fraction"]
    console.print(f"{data['differ']} of {data['prompts']} prompts differ from plain greedy decoding ({share:.1f} %)\n")
    if differences:
        names = ("prompt", "position", "with drafts", "plain", "top logit", "gap", "gap, roundings")
        table = Table(*names, box=None, pad_edge=False)
        for each in differences[:_SHOWN]:
            table.add_row(
                *(str(value) for value in (each.prompt, each.position, each.speculative, each.plain)),
                f"{each.top_logit:.3f}",
                f"{each.gap:.3g}",
                f"{each.gap_roundings:.1f}",
            )
        console.print(table)
        widest = max(each.gap_roundings for each in differences)
        console.print(f"the widest gap is {widest:.1f} roundings of {data['dtype']} at that size\n")
    if speeds:
        table = Table("engine", "decoding", "tokens/s", "accepted", box=None, pad_edge=False)
        for row in speeds:
            figures = (f"{row['tokens_per_s']:.1f}", f"{row['acceptance_length']:.2f}")
            table.add_row(str(row["engine"]), str(row["decoding"]), *figures)
        console.print(table)
        console.print("one prompt after the other, prefill included")
