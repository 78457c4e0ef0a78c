"""The L0 tests of the suite: discovery, identity and errors."""
