"""An Outrider backend for toy."""
