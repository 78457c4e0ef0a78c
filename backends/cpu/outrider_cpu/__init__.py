"""The reference backend: the same contract as a device, executed at once on the host."""
