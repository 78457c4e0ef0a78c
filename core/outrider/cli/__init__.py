"""The command line. Modules here import torch inside their functions, so that `outrider doctor` runs without it."""
