"""The engine: scheduler, step, caches and the fences between them; what a guided request asks for."""

from outrider.engine.guides.guides import ChoiceGuide, Ebnf, Guide, JsonObject, JsonSchema, Regex

__all__ = ["ChoiceGuide", "Ebnf", "Guide", "JsonObject", "JsonSchema", "Regex"]
