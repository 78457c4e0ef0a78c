"""The commands of the kit: ``conform``, ``ci-matrix``, ``new-backend`` and ``support``."""
