"""Registration of operators in the namespace ``outrider``, and the library that owns them."""

from __future__ import annotations

from functools import partial

import torch

from outrider.device.kernels.operators import define_operator, register_operator

# torch unregisters an operator when its Library is collected, so this module must own it.
_LIBRARY = torch.library.Library("outrider", "FRAGMENT")

define = partial(define_operator, _LIBRARY)
"""Register an operator by its name, its implementation, a fake that returns empty results, and the operands it writes."""

register = partial(register_operator, _LIBRARY)
"""Register an operator by its schema, its implementation and a fake that returns empty results."""
