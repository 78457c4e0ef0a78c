"""Mixtures of experts: routing, and the products of the chosen experts."""
