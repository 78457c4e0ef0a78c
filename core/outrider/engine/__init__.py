"""The engine: scheduler, iteration step, caches, and the fences between streams. This package exports the guide classes,
which requests pass in :class:`SamplingParams`.
"""

from outrider.engine.guides.guides import ChoiceGuide, Ebnf, Guide, JsonObject, JsonSchema, Regex

__all__ = ["ChoiceGuide", "Ebnf", "Guide", "JsonObject", "JsonSchema", "Regex"]
