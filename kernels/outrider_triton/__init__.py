"""Triton kernels for every device that Triton compiles for. A backend package selects them; no backend owns them."""
