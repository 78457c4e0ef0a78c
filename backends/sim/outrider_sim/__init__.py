"""A simulated accelerator: a torch device whose streams run in whatever order a strategy picks.

The package is an ordinary Outrider backend (`outrider_sim.plugin`). Its parts, from the bottom up:

- `queue`, `schedule`, `strategies`, `exhaustive`, `shrink`: operations, the orders in which they may go, search;
- `machine`: streams, events, flags, host threads, virtual time, faults;
- `memory`, `pinned`: device blocks behind a caching allocator, and host memory that copies may read in flight;
- `meta`, `ops`, `tensor`, `device`: the torch device type that turns torch calls into queued operations;
- `graphs`: capture and replay;
- `backend`, `plugin`: the seam.

Importing this package registers nothing with torch: creating the backend does, or `outrider_sim.device.register`.
"""
