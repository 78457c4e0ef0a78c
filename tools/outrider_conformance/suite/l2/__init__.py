"""The L2 tests of the suite: capture and replay of graphs."""
