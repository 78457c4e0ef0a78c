"""Tile configurations: derived from a device's facts, measured on a device, and stored.

A kernel set asks :class:`~outrider_triton.tiles.selection.TileSelection`, in which a stored choice takes precedence over a
derived one. A matrix product has a :class:`~outrider_triton.tiles.configs.MatmulConfig`, attention over the cache an
:class:`~outrider_triton.tiles.configs.AttentionConfig`, and prefill attention a ranking of kernels.

- :mod:`~outrider_triton.tiles.derive` ranks candidates by :class:`~outrider_triton.tiles.facts.DeviceFacts` alone.
- :mod:`~outrider_triton.tiles.measure` times candidates in the layers of a model (``outrider tune``).
- :mod:`~outrider_triton.tiles.store` holds measured choices: tables that ship, and choices of one machine.

:mod:`~outrider_triton.tiles.selection` enumerates all configurations that a model may need, so that they are compiled before
requests are served.
"""
