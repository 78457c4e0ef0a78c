"""Prefill and decode apart: an engine that prefills, one that decodes, and a link between their pages."""
