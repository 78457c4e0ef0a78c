"""The HTTP server, and what it tells a cluster."""
