"""The simulated machine: queued operations, streams, events, memory, graphs, host threads and faults."""
