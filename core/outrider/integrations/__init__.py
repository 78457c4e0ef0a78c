"""Adapters for serving orchestrators. Each module needs the package of its orchestrator."""
