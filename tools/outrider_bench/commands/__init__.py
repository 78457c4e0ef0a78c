"""The commands ``outrider bench …``."""
