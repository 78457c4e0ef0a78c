"""The detectors: the order of accesses by vector clocks, stale reads, and divergence between ranks."""
