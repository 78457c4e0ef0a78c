# ruff: noqa
"""Temporary: candidates of attention over prompts, then time to first token with a profile. Not part of the project."""

import argparse
import glob
import json
import statistics
import sys
import time
import traceback
import zipfile

import torch

for each in ("core", "kernels", "tools", "backends/cuda", "backends/cpu", "backends/sim"):
    sys.path.insert(0, each)
for wheel in glob.glob("**/fa3_fwd-*.whl", recursive=True)[:1]:
    zipfile.ZipFile(wheel).extractall("/tmp/fa3")
    sys.path.insert(0, "/tmp/fa3")

DEV = torch.device("cuda:0")
HEADS, KV, SIZE, PAGE = 32, 8, 128, 16


def ms(call, repeat=5):
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        call()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def graphed(call, count=4):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return ms(graph.replay) / count


def candidates():
    from outrider_triton import ops, prompt_ops  # noqa: F401

    OPS = torch.ops.outrider
    fa3 = None
    try:
        import fa3_fwd._C  # noqa: F401

        fa3 = torch.ops.fa3_fwd.fwd
        print("fa3_fwd loaded", flush=True)
    except Exception as error:
        print("no fa3_fwd:", type(error).__name__, str(error)[:300], flush=True)
    shapes = [
        ("512", [512], [0]),
        ("4096", [4096], [0]),
        ("16384", [16384], [0]),
        ("8192 behind 8192", [8192], [8192]),
        ("8 of 512", [512] * 8, [0] * 8),
        ("128 behind 4000", [128], [4000]),
    ]
    for name, new, ctx in shapes:
        lens = [n + c for n, c in zip(new, ctx)]
        tokens, cached = sum(new), sum(lens)
        width = -(-max(lens) // PAGE) + 1
        pages = len(new) * width + 1
        kc, vc = (torch.randn(pages, PAGE, KV, SIZE, device=DEV, dtype=torch.bfloat16) for _ in range(2))
        table = (torch.randperm(pages - 1, device=DEV)[: len(new) * width] + 1).view(len(new), width).int()
        q = torch.randn(tokens, HEADS, SIZE, device=DEV, dtype=torch.bfloat16)
        starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], device=DEV, dtype=torch.int32)
        sl = torch.tensor(lens, device=DEV, dtype=torch.int32)
        scale = SIZE**-0.5
        flops = sum(4 * SIZE * HEADS * (n * c + n * (n + 1) / 2) for n, c in zip(new, ctx))
        # reference rows of the last sequence
        s = len(new) - 1
        slots = (table[s].long()[:, None] * PAGE + torch.arange(PAGE, device=DEV)).flatten()[: lens[s]]
        kk, vv = (x.view(-1, KV, SIZE)[slots].float() for x in (kc, vc))
        rows = torch.tensor(sorted({0, 1, new[s] // 3, new[s] // 2, new[s] - 2, new[s] - 1}), device=DEV)
        qq = q[starts[s] + rows].float().view(-1, KV, HEADS // KV, SIZE)
        sc = torch.einsum("rkgd,nkd->rkgn", qq, kk) * scale
        see = torch.arange(lens[s], device=DEV)[None] <= (ctx[s] + rows)[:, None]
        want = torch.einsum("rkgn,nkd->rkgd", sc.masked_fill(~see[:, None, None], -torch.inf).softmax(-1), vv).flatten(1, 2)

        def copy(padded=SIZE):
            return OPS.copy_context.triton(
                kc, vc, sl, table, prompt_ops.copied_rows(cached, len(new)), max(lens), padded, True
            )

        def old():
            rows_, kv = 64, 64
            from outrider_triton.launch import splits

            groups = len(new) * KV * -(-max(new) // 16)
            return OPS.paged_attention.triton(
                q,
                kc,
                vc,
                starts,
                sl,
                table,
                None,
                max(new),
                max(lens),
                scale,
                0,
                False,
                [rows_, kv, splits(groups, max(lens), 132, kv), 4, 3],
                True,
            )

        def pages_(rows_, *rest):
            blocks = sum(-(-n // rows_) for n in new)
            return OPS.prompt_attention.triton(q, kc, vc, starts, sl, table, None, blocks, scale, 0, [rows_, *rest], True)

        def copied(rows_, *rest):
            blocks = sum(-(-n // rows_) for n in new)
            keys, values, at = copy()
            return OPS.prompt_attention.triton(q, keys, values, starts, sl, table, at, blocks, scale, 0, [rows_, *rest], True)

        def flash3():
            keys, values, at = copy()
            return fa3(
                q,
                keys,
                values,
                cu_seqlens_q=starts,
                cu_seqlens_k=at,
                seqused_k=sl,
                max_seqlen_q=max(new),
                max_seqlen_k=max(lens),
                softmax_scale=scale,
                is_causal=True,
                num_splits=1,
            )[0]

        def exact():
            k = torch.cat([kc.view(-1, KV, SIZE)[:n] for n in lens])
            return k

        def flash2():
            keys, values, at = copy()
            return torch.ops.aten._flash_attention_forward(
                q, keys, values, starts, at, max(new), max(lens), 0.0, True, False, scale=scale, seqused_k=sl
            )[0]

        def sdpa(backend, gqa):
            from torch.nn.attention import sdpa_kernel

            keys, values, _ = copy()
            a = q.view(1, tokens, HEADS, SIZE).transpose(1, 2)
            b, c = (x[:cached].unsqueeze(0).transpose(1, 2) for x in (keys, values))
            if not gqa:
                b, c = (x.repeat_interleave(HEADS // KV, dim=1) for x in (b, c))
            with sdpa_kernel(backend):
                o = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale, enable_gqa=gqa)
            return o.transpose(1, 2).reshape(tokens, HEADS, SIZE)

        from torch.nn.attention import SDPBackend

        calls = {"old": old}
        for c in [(128, 128, 8, 2), (64, 64, 4, 2)]:
            calls[f"pages{c}"] = lambda c=c: pages_(*c)
        for c in [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 3), (64, 32, 4, 4), (128, 64, 8, 3)]:
            calls[f"copied{c}"] = lambda c=c: copied(*c)
        calls["copy alone"] = copy
        if fa3 is not None:
            calls["fa3"] = flash3
        calls["flash2"] = flash2
        if len(new) == 1 and ctx[0] == 0:
            calls["cudnn gqa"] = lambda: sdpa(SDPBackend.CUDNN_ATTENTION, True)
            calls["cudnn expanded"] = lambda: sdpa(SDPBackend.CUDNN_ATTENTION, False)
        for label, call in calls.items():
            try:
                made = call()
                t, th = graphed(call), ms(call)
                if label == "copy alone":
                    print(f"{name:18} {label:28} {t * 1e3:9.1f} us", flush=True)
                    continue
                err = (made[starts[s] + rows].float() - want).abs().max().item()
                print(
                    f"{name:18} {label:28} {t * 1e3:9.1f} us {flops / t / 1e9:7.1f} TFLOP/s ({th * 1e3:.0f} us called)  worst difference {err:.2e}",
                    flush=True,
                )
            except Exception as error:
                print(f"{name:18} {label:28} {type(error).__name__}: {str(error)[:160]!r}", flush=True)


def ttft(lengths, overrides):
    from outrider.device import DeviceError  # noqa: F401
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.engine.requests.sampling import SamplingParams
    from outrider.registry import Registry
    from outrider.speculative.eagle import EagleProposer
    from outrider_bench.random_weights import random_decoder, random_eagle, shape_config

    t0 = time.perf_counter()
    registry = Registry()
    device = registry.create(registry.select("cuda", None))
    from dataclasses import replace

    config = replace(shape_config("llama-3.1-8b"), max_context=32768)
    model = random_decoder(config, backend=device, dtype=torch.bfloat16)
    proposer = EagleProposer(random_eagle(model, backend=device), draft_tokens=3)
    settings = dict(
        max_requests=4,
        draft_tokens=3,
        dtype="bfloat16",
        max_context=20000,
        prefix_cache=False,
        penalties=False,
        max_logprobs=0,
        mode="fused",
        overlap=True,
        prefill_chunk=8192,
    )
    settings.update(overrides)
    engine = Engine(model, device, proposer=proposer, config=EngineConfig(**settings))
    print(
        "engine ready after",
        round(time.perf_counter() - t0, 1),
        "s",
        engine.warm_up,
        engine.captured,
        model.kernels.name,
        flush=True,
    )
    print("prefill graphs:", engine.captured_prefill, flush=True)
    for n in lengths:
        prompt = torch.randint(10, 30000, (n,)).tolist()
        times, marks = [], []
        for i in range(9):
            torch.cuda.synchronize()
            time.sleep(0.05)
            begin = time.perf_counter()
            engine.add_request(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
            mark = [time.perf_counter() - begin]
            first = None
            while engine.has_unfinished:
                for out in engine.step():
                    if out.tokens and first is None:
                        first = time.perf_counter() - begin
                if len(mark) < 5:
                    mark.append(time.perf_counter() - begin)
            times.append(first * 1e3)
            marks.append([round(m * 1e3, 1) for m in mark])
        print(f"prompt {n}: first token after {statistics.median(times[2:]):.2f} ms; all {[round(t, 1) for t in times]}")
        print("   host: add_request, step 1, 2, ...", marks[-1], flush=True)
        from torch.autograd import DeviceType

        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        ) as prof:
            with torch.profiler.record_function("MARK"):
                engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
            torch.cuda.synchronize()
        events = list(prof.events())
        mark = next(e for e in events if e.name == "MARK" and e.device_type == DeviceType.CPU)
        dev = sorted(
            (
                (e.time_range.start, e.time_range.end, e.name)
                for e in events
                if e.device_type == DeviceType.CUDA
                and e.name != "MARK"
                and "::" not in e.name[:12]
                or (e.device_type == DeviceType.CUDA and e.name.startswith("void"))
            ),
            key=lambda x: x[0],
        )
        busy, end, gaps = 0.0, None, []
        for a, b, name in dev:
            if end is None or a > end:
                if end is not None:
                    gaps.append((a - end, name))
                busy += b - a
                end = b
            elif b > end:
                busy += b - end
                end = b
        gaps.sort(reverse=True)
        print(
            f"   call {(mark.time_range.end - mark.time_range.start) / 1e3:.2f} ms; first device work after {(dev[0][0] - mark.time_range.start) / 1e3:.2f}; "
            f"from there {(end - dev[0][0]) / 1e3:.2f} ms, busy {busy / 1e3:.2f}, behind it {(mark.time_range.end - end) / 1e3:.2f}; {len(dev)} pieces"
        )
        print("   gaps (us):", [(round(g), nm[:30]) for g, nm in gaps[:8]], flush=True)
        rows = {}
        for a, b, name in dev:
            t = rows.setdefault(name, [0.0, 0])
            t[0] += b - a
            t[1] += 1
        for name, (t, c) in sorted(rows.items(), key=lambda x: -x[1][0])[:12]:
            print(f"   {t / 1e3:8.2f} ms {c:5} {name[:80]}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", default="attention,ttft")
    parser.add_argument("--config", default="{}")
    given = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    if "attention" in given.what:
        try:
            candidates()
        except Exception:
            traceback.print_exc()
    if "ttft" in given.what:
        ttft([512, 4096, 16384], json.loads(given.config))
