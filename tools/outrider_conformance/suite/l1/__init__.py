"""The L1 tests of the suite: streams, events, copies, memory and threads."""
