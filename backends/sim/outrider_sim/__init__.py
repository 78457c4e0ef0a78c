"""A simulated accelerator: a torch device whose streams run in whatever order a strategy picks.

The package is an ordinary Outrider backend (`outrider_sim.plugin`). Its parts, from the bottom up:

- `queue`, `schedule`, `strategies`, `exhaustive`, `explore`: operations, the orders in which they may go, and search;
- `machine`, `hosts`, `failures`: streams, events, flags, host threads, virtual time, faults;
- `memory`, `pinned`, `sim`: device blocks behind a caching allocator, and host memory that copies may touch in flight;
- `opinfo`, `meta`, `operands`, `dispatch` with `views`, `copies`, `creation`, `rows`: torch calls become queued operations;
- `tensor`, `device`, `torch_module`: the torch device type, its registration, the module `torch.sim`;
- `graphs`: capture and replay;
- `tap`, `backend`, `plugin`, `options`: the backend interface.

Importing this package registers nothing with torch: creating the backend does, or `outrider_sim.device.register`.
"""
