"""A broken checkpoint gives a sound model or one of our errors: no other exception, no hang, no gigabytes."""

import multiprocessing
import random
import resource
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.checkpoints import KINDS, Wrong, draw, outcome

SECONDS = 10
MEMORY = 1 << 30
CASES = 2000

# What was found once: each of these hung, gave a traceback or pages of text, or asked for too much memory.
FOUND = [
    ("eagle3", [("entry", "model.safetensors", "pipe")]),
    ("eagle3", [("entry", "model.safetensors", "huge")]),
    ("llama", [("entry", "tokenizer.json", "zero")]),
    ("llama", [("json", "config.json", ("num_hidden_layers",), "set", 10**30)]),
    ("llama", [("json", "config.json", ("max_position_embeddings",), "set", 10**12)]),
    ("eagle", [("json", "config.json", ("rope_parameters", "rope_theta"), "set", {})]),
    ("door-gpt2", [("json", "config.json", ("attn_pdrop",), "set", [-1] * 5)]),
    ("shards", [("json", "model.safetensors.index.json", ("weight_map", "model.norm.weight"), "set", "x" * 5000 + ".bin")]),
]


class Hang(BaseException):
    """It took longer than it may."""


def within(seconds, work):
    def over(signum, frame):
        raise Hang

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", KINDS)
def test_sound(sound, tmp_path, name):
    """What the fuzzer breaks is whole before."""
    assert outcome(sound, tmp_path, name, []) == "right"


@pytest.mark.parametrize(("name", "mutations"), FOUND, ids=repr)
def test_found(sound, tmp_path, name, mutations):
    assert within(SECONDS, lambda: outcome(sound, tmp_path, name, list(mutations))) == "CheckpointError"


@given(source=st.randoms(use_true_random=False))
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_sample(sound, tmp_path, source):
    name = source.choice(sorted(KINDS))
    mutations = [draw(source, sound / name) for _ in range(source.choice([1, 1, 1, 2, 3]))]
    before = peak()
    within(SECONDS, lambda: outcome(sound, tmp_path, name, mutations))
    assert peak() - before < MEMORY


def run_many(sound, scratch, count, pipe):
    """In a child: each case's name before it runs, its outcome after."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    for seed in range(count):
        source = random.Random(seed)
        name = source.choice(sorted(KINDS))
        mutations = [draw(source, sound / name) for _ in range(source.choice([1, 1, 1, 2, 3]))]
        pipe.send(("begun", f"seed {seed}: {name} {mutations}"))
        try:
            pipe.send(("done", within(SECONDS, lambda: outcome(sound, scratch, name, mutations))))  # noqa: B023
        except Wrong as error:
            pipe.send(("wrong", str(error)))
        except Hang:
            pipe.send(("wrong", f"{name} {mutations}: took more than {SECONDS} s"))
    pipe.send(("end", ""))


@pytest.mark.slow
def test_many(sound, tmp_path):
    """Thousands, in a child with a limit on its memory; one that hangs outside of Python is seen from here."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=run_many, args=(sound, tmp_path, CASES, there), daemon=True)
    child.start()
    there.close()
    found, wrong, last, begun = Counter(), [], "", time.monotonic()
    try:
        while True:
            if not here.poll(3 * SECONDS):
                wrong.append(f"hangs: {last}")
                break
            kind, text = here.recv()
            if kind == "end":
                break
            if kind == "begun":
                last = text
            elif kind == "wrong":
                wrong.append(text)
            else:
                found[text] += 1
    except EOFError:
        wrong.append(f"ended the process: {last}")
    finally:
        child.kill()
        child.join()
    print(f"{sum(found.values())} of {CASES} in {time.monotonic() - begun:.0f} s: {dict(found)}; {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)
    assert sum(found.values()) == CASES
