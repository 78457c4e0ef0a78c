"""The command ``outrider explore``."""
