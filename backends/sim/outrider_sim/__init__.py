"""A simulated accelerator: a torch device on which a strategy decides the order of all streams' operations.

The package is an ordinary Outrider backend (`outrider_sim.plugin`), with four subpackages:

- `machine`: queued operations, streams, events and flags, memory, graphs, host threads, virtual time and faults;
- `explore`: scheduling strategies, recorded schedules, and the search for a failing schedule;
- `torch_device`: the torch device type; torch calls become queued operations, and the module `torch.sim`;
- `ranks`: collectives, and `torch.distributed` between ranks that are host threads.

Creating the backend, or calling `outrider_sim.backend.register_device`, registers the device with torch; an import does not.
"""
