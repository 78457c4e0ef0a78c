"""The kit tested by mutation: correct backends broken mechanically, and correct ones that are unusual.

`python -m conformance.mutants` (with `tests` in the import path) runs them; `faults_*.py` say what is broken, `legal.py`
what is unusual, `harness.py` runs the suite on one of them in a process of its own.
"""
