"""The proof tested by mutation: the engine changed in one place at a time, and random host programs that run on it.

`python -m proof.mutants` (with `tests` in the import path) runs the mutants.
"""
