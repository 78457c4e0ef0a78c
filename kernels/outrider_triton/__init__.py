"""Kernels in Triton for the devices that Triton compiles for; a backend package picks them up, none owns them."""
