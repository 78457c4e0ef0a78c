"""All of torch's OpInfos on the simulated device, compared with the host: forward, backward, in place, into `out=`.

    python tests/sim/opinfo_run.py --journal opinfo.jsonl [--only add,mul] [--samples 4] [--seed 0]

A seed draws other values, and takes other samples of an operator that has more than are run.

The work is done by a child process, one operator after the other. What an operator does is written to the journal; where the
process dies or hangs, that is written, and another one goes on behind it. A journal that is there already is continued.
"""

import argparse
import faulthandler
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from opinfo_exceptions import DIFFERENT, SHAPES_ONLY

SECONDS = 240  # for an operator, before it counts as hanging
PHASES = ("forward", "backward", "inplace", "out")


def op_infos():
    """The database. Importing it takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def title(op):
    """An OpInfo by a name that no other has."""
    return op.name + (f":{op.variant_test_name}" if op.variant_test_name else "")


class Comparison:
    """Runs the samples of one OpInfo on host and device."""

    def __init__(self, backend, samples, seed=0):
        self.backend = backend
        self.samples = samples
        self.seed = seed
        self.device = backend.device
        self.shapes_only = False

    def check(self, op):
        """Phase → kinds of outcome, and what the first failure of each phase said."""
        import torch

        found, said = {}, {}
        if torch.float32 in op.dtypes:
            dtype = torch.float32
        else:
            usual = (torch.int64, torch.complex64, torch.bool)
            dtype = next((d for d in usual if d in op.dtypes), None) or next(iter(op.dtypes), None)
        if dtype is None:
            return {"forward": {"no dtype": 1}}, {}
        self.shapes_only = op.name in SHAPES_ONLY
        grad = op.supports_autograd and dtype.is_floating_point
        torch.manual_seed(self.seed)
        chosen = self._chosen(op, dtype, grad)
        phases = {"forward": True, "backward": grad, "inplace": op.get_inplace() is not None, "out": op.supports_out}
        for phase in PHASES:
            if not phases[phase]:
                continue
            counts = Counter()
            for sample in chosen:
                try:
                    outcome = getattr(self, phase)(op, sample)
                except _HostRefuses:
                    outcome = "host refuses"
                except BaseException as error:
                    if isinstance(error, KeyboardInterrupt):
                        raise
                    outcome = "lost" if "DeviceLost" in type(error).__name__ else type(error).__name__
                    said.setdefault(phase, str(error).strip()[:400])
                counts[outcome] += 1
                self._recover()
            found[phase] = dict(counts)
        return found, said

    def _chosen(self, op, dtype, grad):
        made = []
        for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=grad)):
            if number >= 256:
                break
            made.append(sample)
        step = max(1, math.ceil(len(made) / self.samples))
        return made[self.seed % step :: step]

    def _recover(self):
        from outrider.device import OutriderError

        try:
            self.backend.synchronize()
        except OutriderError:
            self.backend.control.reset()

    # -- phases -------------------------------------------------------------------------------------------------------

    def forward(self, op, sample):
        import torch

        with torch.no_grad():
            return self._compare(lambda s: op(s.input, *s.args, **s.kwargs), sample)

    def inplace(self, op, sample):
        import torch

        def run(s):
            target = torch.empty_strided(s.input.shape, s.input.stride(), dtype=s.input.dtype, device=s.input.device)
            target.copy_(s.input)
            result = op.get_inplace()(target, *s.args, **s.kwargs)
            assert result is target
            return target

        if not isinstance(sample.input, torch.Tensor) or sample.broadcasts_input:
            return "not meant"
        with torch.no_grad():
            return self._compare(run, sample)

    def out(self, op, sample):
        import torch

        with torch.no_grad():
            shapes = _attempt(lambda: op(sample.input, *sample.args, **sample.kwargs))
            if not isinstance(shapes, torch.Tensor):
                return "not one tensor"

            def run(s, device="cpu"):
                out = torch.empty_strided(shapes.shape, shapes.stride(), dtype=shapes.dtype, device=device)
                out.fill_(1)  # torch leaves it as it was for a few (ihfftn along one dimension), on the host as well
                assert op(s.input, *s.args, **s.kwargs, out=out) is out
                return out

            return self._compare(run, sample, lambda s: run(s, self.device))

    def backward(self, op, sample):
        import torch

        def run(s):
            result = op(s.input, *s.args, **s.kwargs)
            result = s.output_process_fn_grad(result)
            leaves = [t for t in _tensors((s.input, s.args, s.kwargs)) if t.requires_grad]
            outs = [t for t in _tensors(result) if t.requires_grad]
            total = sum((t.abs() if t.is_complex() else t).sum() for t in outs)
            if not leaves or not isinstance(total, torch.Tensor):
                return None
            return torch.autograd.grad(total, leaves, allow_unused=True)

        return self._compare(run, sample)

    # -- comparing ----------------------------------------------------------------------------------------------------

    def _compare(self, run, sample, run_there=None):

        host = _attempt(lambda: run(sample))
        again = _attempt(lambda: run(sample))
        # What draws, or leaves undefined, differs from itself.
        stable = not self.shapes_only and _same(host, again) is None
        moved = sample.transform(lambda value: _moved(value, self.device))
        if "device" in moved.kwargs:
            moved.kwargs["device"] = self.device
        device = (run_there or run)(moved)
        on_device = next(_tensors((moved.input, moved.args, moved.kwargs)), None) is not None
        for tensor in _tensors(device):
            if tensor.device.type != self.device.type and on_device:
                raise AssertionError(f"a result is on {tensor.device}")
        back = _host(device)
        self.backend.synchronize()
        different = _same(host, back, values=stable)
        if different is not None:
            raise AssertionError(different)
        return "equal" if stable else "shape equal"


class _HostRefuses(Exception):
    """The host fails on the sample as well."""


def _attempt(run):
    try:
        return run()
    except Exception as error:
        raise _HostRefuses(str(error)) from error


def _moved(value, device):
    import torch

    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        made = value.detach().to(device)
        return made.requires_grad_(value.requires_grad)
    return value


def _tensors(value):
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _host(value):
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, list | tuple):
        return [_host(item) for item in value]
    return value


def _same(one, other, values=True):
    """What differs, in words; None: nothing."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{tuple(one.shape)} {one.dtype} on the host, {tuple(other.shape)} {other.dtype} on the device"
        if values:
            try:
                torch.testing.assert_close(other.detach(), one.detach(), equal_nan=True, rtol=1e-4, atol=1e-5)
            except AssertionError as error:
                return str(error)
        return None
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{len(one)} results on the host, {len(other)} on the device"
        return next((text for a, b in zip(one, other, strict=True) if (text := _same(a, b, values)) is not None), None)
    if (one is None) != (other is None):
        return f"{type(one).__name__} on the host, {type(other).__name__} on the device"
    if values and isinstance(one, bool | int | float) and one != other and one == one:
        return f"{one} on the host, {other} on the device"
    return None


# -- processes ---------------------------------------------------------------------------------------------------------


def worker(journal, only, samples, seed, done):
    """Go through what isn't done yet."""
    import torch

    from outrider import get_backend

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="An output with one or more elements was resized")
    backend = get_backend("sim")
    comparison = Comparison(backend, samples, seed)
    with Path(journal).open("a") as out:
        for op in op_infos():
            name = title(op)
            if name in done or (only and op.name not in only and name not in only):
                continue
            print(json.dumps({"op": name, "began": True}), file=out, flush=True)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            began = time.monotonic()
            try:
                found, said = comparison.check(op)
            except Exception as error:
                found, said = {"samples": {type(error).__name__: 1}}, {"samples": str(error)[:300]}
            faulthandler.cancel_dump_traceback_later()
            entry = {"op": name, "found": found, "said": said, "seconds": round(time.monotonic() - began, 2)}
            print(json.dumps(entry), file=out, flush=True)


def read(journal):
    """Operator → its entry; one that was begun and has none ended its process."""
    entries = {}
    if Path(journal).exists():
        for line in Path(journal).read_text().splitlines():
            entry = json.loads(line)
            if "began" in entry:
                entries[entry["op"]] = {"op": entry["op"], "found": {"process": {"ended": 1}}, "said": {}}
            else:
                entries[entry["op"]] = entry
    return entries


def run(journal, only=(), samples=4, seed=0):
    """All operators, in as many processes as it takes; returns the entries."""
    while True:
        done = read(journal)
        command = [
            sys.executable,
            __file__,
            "--journal",
            str(journal),
            "--worker",
            "--samples",
            str(samples),
            "--seed",
            str(seed),
        ]
        command += ["--only", ",".join(only)] if only else []
        ended = subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
        if ended == 0:
            return read(journal)
        if len(read(journal)) == len(done):
            raise RuntimeError(f"the process ended with {ended} before it began an operator")


GOOD = frozenset({"equal", "shape equal", "host refuses", "not meant", "not one tensor", "no dtype"})


def failures(entries):
    """`(operator, phase)` → what happened, for everything that isn't as on the host."""
    bad = {}
    for name, entry in entries.items():
        for phase, counts in entry["found"].items():
            wrong = {kind: count for kind, count in counts.items() if kind not in GOOD}
            if wrong:
                bad[name, phase] = f"{wrong} {entry['said'].get(phase, '')}".replace("\n", " ")
    return bad


def main():
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--journal", required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    if options.worker:
        worker(options.journal, only, options.samples, options.seed, read(options.journal))
        return
    entries = run(options.journal, only, options.samples, options.seed)
    total = Counter()
    for entry in entries.values():
        for counts in entry["found"].values():
            total.update(counts)
    for (name, phase), text in sorted(failures(entries).items()):
        print(f"{'listed: ' if name in DIFFERENT else ''}{name} {phase}: {text[:220]}")
    print(len(entries), "operators:", dict(total))


if __name__ == "__main__":
    main()
