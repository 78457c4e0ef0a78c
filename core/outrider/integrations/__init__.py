"""Adapters for orchestrators that exist: one module for each, which needs the orchestrator's own package."""
