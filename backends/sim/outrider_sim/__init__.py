"""A simulated accelerator: a torch device on which a strategy decides the order of all streams' operations.

The package is an ordinary Outrider backend (`outrider_sim.plugin`). Its parts, from the bottom up:

- `queue`, `schedule`, `strategies`, `exhaustive`, `explore`: operations, the orders in which they may go, and search;
- `machine`, `hosts`, `failures`: streams, events, flags, host threads, virtual time, faults;
- `memory`, `pinned`, `sim`: a caching allocator of device blocks, and pinned host memory that queued copies access;
- `opinfo`, `meta`, `operands`, `dispatch` with `views`, `copies`, `creation`, `rows`: torch calls become queued operations;
- `tensor`, `device`, `torch_module`: the torch device type, its registration, the module `torch.sim`;
- `graphs`: capture and replay;
- `tap`, `backend`, `plugin`, `options`: the backend interface.

Creating the backend or calling `outrider_sim.torch_registration.register` registers the device with torch; an import doesn't.
"""
