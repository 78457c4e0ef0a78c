"""Metrics, request spans, log formats, and events of the prefix cache, for operators of a server."""
