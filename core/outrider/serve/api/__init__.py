"""Requests and responses in OpenAI's format, and the service that admits and generates them."""
