"""`python -m conformance.mutants`: the whole run, or a part; `--write` puts the table into the docs."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path

_SOUND = 20.0
"""Factor of the time limits of a sound backend, which never hangs: a limit could only convict a machine that is busy."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="those with TEXT in their name")
    parser.add_argument(
        "--kill", action="append", default=[], metavar="NAME", help="one mutant, against its test in the table"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--no-legal", action="store_true", help="broken ones alone")
    parser.add_argument("--no-broken", action="store_true", help="legal ones alone")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep results there; what it has already isn't run again")
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/reference/generated/conformance-mutations.md"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    from conformance.mutants import harness, table

    harness.warm_up()
    if options.kill:
        return _kill(options.kill, options.jobs)
    record = harness.Record(options.record)
    broken = {} if options.no_broken else {n: m for n, m in table.mutants().items() if options.only in n}
    legal = {} if options.no_legal else {n: m for n, m in table.legals().items() if options.only in n}
    record.forget(lambda key, outcome: _wrong(key, outcome, broken, legal))
    jobs = [((True, name), (m.base, m.apply, m.level, m.tests, True)) for name, m in broken.items()]
    jobs += [((False, name), (one.base, one.apply, one.level, (), True, 0, "", _SOUND)) for name, one in legal.items()]
    results, lived, wrong = {}, {}, 0
    for (is_broken, name), outcome in record.completed(jobs, options.jobs):
        (results if is_broken else lived)[name] = outcome
        bad = _wrong((is_broken, name), outcome, broken, legal)
        wrong += bad
        wanted = f"at L{broken[name].level}" if is_broken else f"passes L{legal[name].level}"
        found = f"{outcome.failed[0][0]}: {outcome.failed[0][2][:100]!r}" if outcome.failed else outcome.broke or "passes"
        print(f"{'WRONG' if bad else 'ok':<6}{name} | {wanted} | {found} | {outcome.seconds:.1f} s", flush=True)
        if bad and (outcome.broke or not outcome.ran):
            print(outcome.output[-1500:], flush=True)
    seconds = sum(outcome.seconds for outcome in (*results.values(), *lived.values()))
    print(f"{len(results)} broken, {len(lived)} legal, {wrong} not as expected, {seconds:.0f} s")
    if options.write:
        when = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        table.write(table.render(results, lived, when, seconds, options.jobs))
    return 1 if wrong else 0


def _kill(names, at_a_time) -> int:
    """Run each mutant against the one test that kills it, and the unbroken backends against the same tests."""
    from conformance.mutants import harness, table

    known, mutants = table.read()[0], table.mutants()
    jobs, sound = [], {}
    for name in names:
        mutant, (level, test) = mutants[name], known[name]
        test = test.partition("[")[0]  # pytest takes no parameters in a name that it looks up as a package
        jobs.append((name, (mutant.base, mutant.apply, level, (test,), True)))
        tests, highest = sound.get(mutant.base, ((), 0))
        sound[mutant.base] = (tuple(dict.fromkeys((*tests, test))), max(level, highest))
    jobs += [
        ((base,), (base, lambda base: None, level, tests, False, 0, "", _SOUND)) for base, (tests, level) in sound.items()
    ]
    missed = 0
    for key, outcome in harness.run_all(jobs, at_a_time):
        broken = key in mutants
        fine = bool(outcome.failed) if broken else bool(outcome.ran and not outcome.failed and not outcome.broke)
        missed += not fine
        word = ("ok" if broken else "sound") if fine else "WRONG"
        print(f"{word:<6}{key} | {outcome.failed[:1] or outcome.broke or 'passes'} | {outcome.seconds:.1f} s", flush=True)
    return 1 if missed else 0


def _wrong(key, outcome, broken, legal) -> bool:
    """Whether it isn't what was expected."""
    is_broken, name = key
    if name not in (broken if is_broken else legal):
        return False
    if not is_broken:
        return bool(outcome.failed or outcome.broke or not outcome.ran)
    return outcome.level != broken[name].level


if __name__ == "__main__":
    sys.exit(main())
