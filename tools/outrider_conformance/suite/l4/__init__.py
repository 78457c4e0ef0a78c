"""The L4 tests of the suite: kernels and the overlapped speculative engine."""
