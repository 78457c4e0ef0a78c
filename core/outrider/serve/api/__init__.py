"""Requests and responses in OpenAI's format, and the service that admits requests and runs their generation."""
