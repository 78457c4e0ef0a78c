"""The L5 tests of the suite: figures that are reported and not checked."""
