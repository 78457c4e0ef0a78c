"""Formats of model families: how a model writes reasoning and tool calls, and the reader of such text."""
