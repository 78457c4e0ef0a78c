"""The L6 tests of the suite: collectives between two ranks."""
