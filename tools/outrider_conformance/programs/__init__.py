"""Random programs over the seam, judged by a model of its contract."""
