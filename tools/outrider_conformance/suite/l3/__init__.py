"""The L3 tests of the suite: flags and graph parameters."""
