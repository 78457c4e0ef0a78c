"""Configs: the shape of a decoder, the parsing of config.json, and published shapes by name."""
