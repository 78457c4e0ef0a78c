"""JSON schemas as far as the engine can enforce them during generation. Every other keyword raises an error.

Supported keywords:

- general: ``type`` (one or several), ``enum``, ``const``, ``$ref`` within the schema, ``anyOf``, ``allOf``, ``oneOf`` of
  schemas that have no value in common, also next to other keywords if one schema can say the same;
- numbers: ``minimum``, ``maximum``, ``exclusiveMinimum``, ``exclusiveMaximum``;
- strings: ``minLength``, ``maxLength``, ``pattern`` (for the whole string), ``format`` (of no effect next to a pattern);
- arrays: ``items``, ``prefixItems`` (in older drafts a list in ``items``), ``minItems``, ``maxItems``;
- objects: ``properties``, ``required``, ``additionalProperties``, ``minProperties``, ``maxProperties``.

Descriptions, titles, defaults, examples and OpenAPI's ``discriminator`` have no effect, and neither has ``propertyNames`` if
it allows every name. ``propertyNames`` with ``enum`` lists the properties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from outrider.device.errors import ConfigError
from outrider.engine.guides.patterns import FORMATS, FREE_FORMATS, IMPLIED_PATTERNS, to_xgrammar_syntax
from outrider.errors import shown

MAX_DEPTH = 64
"""Maximum nesting depth of schemas."""
MAX_NODES = 4096
"""Maximum number of schemas within one schema."""
MAX_PROPERTIES = 512
"""Maximum number of properties of an object."""
MAX_BRANCHES = 128
"""Maximum number of alternatives in ``anyOf`` and ``oneOf``."""
MAX_COUNT = 1 << 16
"""Maximum value of a length limit or an item count."""
MAX_NUMBER = 1 << 53
"""Maximum absolute value of a limit of numbers. JavaScript's safe integers, the limits of Zod's ``z.int()``, are below it."""
_EXACT_INTEGERS = range(-(1 << 63), 1 << 63)
"""Integers that xgrammar writes digit by digit. It rounds others to floating-point numbers."""

_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("$comment", "$schema", "$id", "example", "contentEncoding", "contentMediaType", "contentSchema"),
        *("$defs", "definitions"),
    )
)
"""Keywords without an effect on the values, and those whose schemas only references use."""
_COMBINATORS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NUMBER_KEYWORDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_NUMBER_FORMATS: Mapping[str, tuple[int, int] | None] = MappingProxyType(
    {"float": None, "double": None, "int": (-MAX_NUMBER, MAX_NUMBER), "uint": (0, MAX_NUMBER)}
    | {f"int{bits}": (max(-(1 << bits - 1), -MAX_NUMBER), min((1 << bits - 1) - 1, MAX_NUMBER)) for bits in (8, 16, 32, 64)}
    | {f"uint{bits}": (0, min((1 << bits) - 1, MAX_NUMBER)) for bits in (8, 16, 32, 64)}
)
"""OpenAPI's formats of numbers, and those of Rust's schemas: their least and greatest values, or None without a limit."""
_KEYWORDS_OF_TYPE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "null": frozenset(),
        "boolean": frozenset(),
        "integer": _NUMBER_KEYWORDS | {"format"},
        "number": _NUMBER_KEYWORDS | {"format"},
        "string": frozenset(("minLength", "maxLength", "pattern", "format")),
        "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
        "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
    }
)
_COUNT_KEYWORDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LIMITS = _NUMBER_KEYWORDS.union(_COUNT_KEYWORDS)
_SCALARS = (str, int, float, type(None))


def supported_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``schema`` in a form that xgrammar enforces completely.

    Raises :class:`ConfigError` with the JSON pointer of a keyword that can't be enforced.
    """
    return _SchemaReader(schema).read_root()


def find_reference(reference: Any, root: Any) -> Any:
    """Return the schema in ``root`` that ``reference``, the value of a ``$ref``, points to, or None if there is none."""
    target: Any = root
    parts = unquote(reference).split("/") if isinstance(reference, str) else [""]
    for part in parts[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list | tuple) and part.isdecimal() and int(part) < len(target):
            target = target[int(part)]
        else:
            target = target.get(part) if isinstance(target, Mapping) else None
    return target if parts[0] == "#" else None


def resolve_reference(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return ``schema``, or the schema in ``root`` that its ``$ref`` stands for; an empty schema if there is none."""
    for _ in range(MAX_DEPTH):
        if isinstance(schema, Mapping) and "$ref" in schema:
            schema = find_reference(schema["$ref"], root)
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else {}


class _SchemaReader:
    """The translator of one JSON schema into keywords that xgrammar enforces. ``root`` is the schema that references point
    into.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._nodes = 0
        self._references = {"#": "#"}
        """The reference in the translation for each reference in the schema."""

    def read_root(self) -> dict[str, Any]:
        """Return the translation of the whole schema. Its ``$defs`` are all schemas that references point to, wherever these
        stand.
        """
        translated = dict(self.read_schema(self._root, "#", 0))
        definitions: dict[str, Any] = {}
        while len(definitions) < len(self._references) - 1:  # a definition may have further references
            pointer = [*self._references][len(definitions) + 1]
            schema = self.read_schema(find_reference(pointer, self._root), pointer, 1)
            definitions[str(len(definitions) + 1)] = schema
        return translated | ({"$defs": definitions} if definitions else {})

    def read_schema(self, schema: Any, pointer: str, depth: int) -> Any:
        """Return the translation of ``schema``, which stands at the JSON pointer ``pointer``. Raises :class:`ConfigError` for
        an unsupported keyword, and beyond the limits of depth and number.
        """
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise ConfigError(
                f"the JSON schema has more than {MAX_NODES} schemas, or more than {MAX_DEPTH} within each other, at {pointer}"
            )
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise _unexpected(pointer, schema, "a schema: an object, or true")
        keywords = _without_annotations(schema)
        if _allows_every_text(keywords.get("propertyNames")):
            del keywords["propertyNames"]
        elif (names := _fixed_values(keywords.get("propertyNames"))) and "properties" not in keywords:
            del keywords["propertyNames"]
            keywords["properties"] = dict.fromkeys(map(str, names), keywords.pop("additionalProperties", True))
        if isinstance(keywords.get("items"), list | tuple) and "prefixItems" not in keywords:  # drafts before 2020-12
            keywords["prefixItems"] = keywords.pop("items")
            if "additionalItems" in keywords:
                keywords["items"] = keywords.pop("additionalItems")
        combinator = next((key for key in _COMBINATORS if key in keywords), None)
        if combinator is None:
            return self._typed(keywords, pointer, depth)
        if combinator not in ("const", "enum") and (len(keywords) > 1 or combinator == "allOf"):
            return self.read_schema(self._join(keywords, pointer), pointer, depth + 1)
        return self._combinator(combinator, keywords, pointer, depth)

    def _join(self, keywords: dict[str, Any], pointer: str) -> Any:
        """Return one schema for the keywords of a schema and of its ``$ref`` and ``allOf``: each alternative of its ``anyOf``
        or ``oneOf`` gets all of them.
        """
        alternatives = next((key for key in ("anyOf", "oneOf") if key in keywords), None)
        apart = ("$ref", "allOf", alternatives)
        joined = {key: value for key, value in keywords.items() if key not in apart}
        parts = [{"$ref": keywords["$ref"]}] if "$ref" in keywords else []
        for part in parts + self._schemas("allOf", keywords, pointer):
            joined = _merge(joined, self._resolved(part, pointer), pointer)
        if alternatives is None:
            return joined if len(keywords) > 1 or len(keywords["allOf"]) > 1 else keywords["allOf"][0]
        branches = [self._resolved(each, pointer) for each in self._schemas(alternatives, keywords, pointer)]
        return {alternatives: [_merge(joined, each, pointer) for each in branches]} if joined else {alternatives: branches}

    def _resolved(self, schema: Any, pointer: str) -> dict[str, Any]:
        """Return the keywords of ``schema``, or of the schema that its ``$ref`` alone stands for."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping):
                break
            keywords = _without_annotations(schema)
            if set(keywords) != {"$ref"}:
                return keywords
            schema = self._target(keywords["$ref"], pointer)
        if schema is True:
            return {}
        raise _unexpected(pointer, schema, "a schema: an object, or true")

    def _target(self, reference: Any, pointer: str) -> Any:
        target = find_reference(reference, self._root)
        if target is None:
            raise _unexpected(f"{pointer}/$ref", reference, "'#', or '#/…' that names a schema in this one")
        return target

    def _schemas(self, key: str, keywords: Mapping[str, Any], pointer: str) -> list[Any]:
        """Return the schemas of the combinator ``key``."""
        schemas = keywords.get(key, [])
        if not isinstance(schemas, list | tuple) or (key in keywords and not 0 < len(schemas) <= MAX_BRANCHES):
            raise _unexpected(f"{pointer}/{key}", schemas, f"a list of 1 to {MAX_BRANCHES} schemas")
        return list(schemas)

    def _combinator(self, key: str, keywords: dict[str, Any], pointer: str, depth: int) -> dict[str, Any]:
        """Return the translation of a schema with the keyword ``key`` of :data:`_COMBINATORS`."""
        value = keywords.pop(key)
        types = _types(keywords.pop("type"), pointer) if "type" in keywords and key in ("const", "enum") else None
        for other in keywords:
            raise ConfigError(
                f"the JSON schema has {other!r} beside {key!r} at {pointer}; they can't be enforced together: put them into "
                "one"
            )
        if key == "$ref":
            self._target(value, pointer)
            return {key: self._references.setdefault(value, f"#/$defs/{len(self._references)}")}
        if key in ("const", "enum"):
            values = [value] if key == "const" else value
            if not isinstance(values, list | tuple) or not values:
                raise _unexpected(f"{pointer}/{key}", value, "a list of values")
            for each in values:
                if types is not None and not _has_type(each, types):
                    raise ConfigError(f"the JSON schema has {shown(each)} at {pointer}/{key}, which isn't of its type")
                if _has_rounded_integer(each):
                    raise _unexpected(f"{pointer}/{key}", each, "integers of at most 64 bits")
            return {key: value}
        schemas = self._schemas(key, {key: value}, pointer)
        branches = [self.read_schema(each, f"{pointer}/{key}/{index}", depth + 1) for index, each in enumerate(schemas)]
        if key == "oneOf":
            self._check_disjoint(value, pointer)
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _check_disjoint(self, branches: Any, pointer: str) -> None:
        """Raise :class:`ConfigError` if a value may fit two of the schemas."""
        resolved = [resolve_reference(branch, self._root) for branch in branches]
        if not all(_are_disjoint(one, other) for one, other in combinations(resolved, 2)):
            raise ConfigError(
                f"the JSON schema has 'oneOf' at {pointer}, and a value may fit several of its schemas; use 'anyOf', "
                "or give each another type, a 'const' of its own, or a required property with a 'const' of its own"
            )

    def _typed(self, keywords: dict[str, Any], pointer: str, depth: int) -> dict[str, Any]:
        """Return the translation of a schema with ``type``, or with keywords that imply a type."""
        if not keywords:
            return {}
        if "type" in keywords:
            types = _types(keywords.pop("type"), pointer)
        else:
            implied = ("number", "string", "array", "object")
            types = tuple(name for name in implied if any(key in _KEYWORDS_OF_TYPE[name] for key in keywords))[:1]
        supported = frozenset().union(*(_KEYWORDS_OF_TYPE[name] for name in types)) if types else frozenset()
        for key in keywords:
            if key not in supported:
                raise ConfigError(
                    f"the JSON schema has {key!r} at {pointer}, which can't be enforced there; leave it out, or write it "
                    "otherwise"
                )
        parts = [
            self._of_type(name, {k: v for k, v in keywords.items() if k in _KEYWORDS_OF_TYPE[name]}, pointer, depth)
            for name in types
        ]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _of_type(self, name: str, keywords: dict[str, Any], pointer: str, depth: int) -> dict[str, Any]:
        for key in _COUNT_KEYWORDS:
            if key in keywords and not (_is_int(keywords[key]) and 0 <= keywords[key] <= MAX_COUNT):
                raise _unexpected(f"{pointer}/{key}", keywords[key], f"a whole number of 0 to {MAX_COUNT}")
        for key in _NUMBER_KEYWORDS & keywords.keys():
            limit = keywords[key]
            outside = isinstance(limit, int | float) and (limit < -MAX_NUMBER if "min" in key.lower() else limit > MAX_NUMBER)
            if outside:  # a narrower limit allows a part of the numbers
                keywords[key] = limit = MAX_NUMBER if limit > 0 else -MAX_NUMBER
            if name == "integer" and isinstance(limit, float) and abs(limit) <= MAX_NUMBER:
                keywords[key] = (math.ceil if key in ("minimum", "exclusiveMaximum") else math.floor)(limit)
            if not isinstance(limit, int | float) or isinstance(limit, bool) or abs(limit) > MAX_NUMBER:
                raise _unexpected(f"{pointer}/{key}", limit, "a number of at most 2**53")
        result: dict[str, Any] = {"type": name, **keywords}
        if name in ("integer", "number") and "format" in result:
            known = result.pop("format")
            if known not in _NUMBER_FORMATS:
                raise _unexpected(f"{pointer}/format", known, f"one of {', '.join(_NUMBER_FORMATS)}")
            if (limits := _NUMBER_FORMATS[known]) is not None:
                result["minimum"] = max(limits[0], result.get("minimum", limits[0]))
                result["maximum"] = min(limits[1], result.get("maximum", limits[1]))
        if name == "string":
            self._string(result, pointer)
        if name == "array":
            self._array(result, pointer, depth)
        if name == "object":
            self._object(result, pointer, depth)
        return result

    def _string(self, result: dict[str, Any], pointer: str) -> None:
        for key in ("pattern", "format"):
            if key in result and (not isinstance(result[key], str) or len(result[key]) > MAX_COUNT):
                raise _unexpected(f"{pointer}/{key}", shown(result[key]), "a text")
        least, most = result.pop("minLength", 0), result.pop("maxLength", None)
        if most is not None and least > most:
            raise _unexpected(f"{pointer}/minLength", least, f"at most maxLength, {most}")
        pattern, name = result.pop("pattern", None), result.pop("format", None)
        if name is not None and (pattern is None or pattern in IMPLIED_PATTERNS.get(name, ())):
            if name not in FORMATS and name not in FREE_FORMATS:
                raise _unexpected(f"{pointer}/format", name, f"one of {', '.join((*FORMATS, *FREE_FORMATS))}")
            pattern = FORMATS.get(name)
        if pattern is None and (least or most is not None):
            pattern = '[^"]*'
        if pattern is not None:
            result["pattern"] = to_xgrammar_syntax(pattern, in_json=True, lengths=(least, most))

    def _array(self, result: dict[str, Any], pointer: str, depth: int) -> None:
        if result.pop("uniqueItems", False) is not False:
            raise ConfigError(f"the JSON schema has 'uniqueItems' at {pointer}, which can't be enforced; leave it out")
        if "prefixItems" in result:
            items = result["prefixItems"]
            if not isinstance(items, list | tuple) or not items:
                raise _unexpected(f"{pointer}/prefixItems", items, "a list of schemas")
            result["prefixItems"] = [
                self.read_schema(each, f"{pointer}/prefixItems/{index}", depth + 1) for index, each in enumerate(items)
            ]
        # If 'items' is missing, an array has no items after those of 'prefixItems'.
        if result.get("items", "prefixItems" not in result) is not False:
            result["items"] = self.read_schema(result.get("items", True), f"{pointer}/items", depth + 1)

    def _object(self, result: dict[str, Any], pointer: str, depth: int) -> None:
        properties, required = result.get("properties", {}), result.get("required", [])
        if not isinstance(properties, Mapping) or len(properties) > MAX_PROPERTIES:
            raise _unexpected(f"{pointer}/properties", properties, f"an object of at most {MAX_PROPERTIES} schemas")
        if not isinstance(required, list | tuple) or not all(isinstance(each, str) for each in required):
            raise _unexpected(f"{pointer}/required", required, "a list of names")
        additional = result.get("additionalProperties", not properties)
        undefined = next((each for each in required if each not in properties), None)
        if undefined is not None:
            raise ConfigError(
                f"the JSON schema requires {undefined!r} at {pointer}, which its 'properties' don't have; add it"
            )
        result["properties"] = {
            key: self.read_schema(each, f"{pointer}/properties/{key}", depth + 1) for key, each in properties.items()
        }
        if not properties:
            del result["properties"]
        # JSON allows a repeated name, and its last value counts. Named and additional properties together could then
        # violate the schema of a named one, so the result allows either kind, never both.
        allows_additional = not properties and additional is not False
        result["additionalProperties"] = allows_additional and (
            self.read_schema(additional, f"{pointer}/additionalProperties", depth + 1) or True
        )
        if not properties and result.get("minProperties", 0) > 1:
            raise ConfigError(
                f"the JSON schema has 'minProperties' {result['minProperties']} at {pointer} without 'properties'; more than "
                "1 can't be enforced"
            )


def _merge(one: Mapping[str, Any], other: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """Return a schema that allows the values that both schemas allow. Raises :class:`ConfigError` for keywords that no single
    schema can state together.
    """
    merged = dict(one)
    for key, value in other.items():
        mine = merged.setdefault(key, value)
        both = (mine, value)
        if mine == value:
            continue
        if key == "properties" and all(isinstance(each, Mapping) for each in both):
            merged[key] = mine | {
                name: {"allOf": [mine[name], each]} if name in mine else each for name, each in value.items()
            }
        elif key in ("required", "allOf") and all(isinstance(each, list) for each in both):
            merged[key] = [*mine, *(each for each in value if each not in mine)]
        elif key == "type" and (types := _common_types(_types(mine, pointer), _types(value, pointer))):
            merged[key] = types
        elif key in _LIMITS and all(isinstance(each, int | float) for each in both):
            merged[key] = (max if "min" in key.lower() else min)(both)
        else:
            raise ConfigError(f"the JSON schema has two different {key!r} at {pointer}; they can't be enforced together")
    for schema in (one, other):
        if schema.get("additionalProperties", True) is not True:
            undefined = next(
                (name for name in merged.get("properties", ()) if name not in schema.get("properties", ())), None
            )
            if undefined is not None:
                raise ConfigError(f"the JSON schema has {undefined!r} at {pointer}, which its 'additionalProperties' refuse")
    return merged


def _without_annotations(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in _ANNOTATIONS and not key.startswith("x-")}


def _allows_every_text(schema: Any) -> bool:
    return schema is True or (isinstance(schema, Mapping) and _without_annotations(schema) in ({}, {"type": "string"}))


def _types(schema: Any, pointer: str) -> tuple[str, ...]:
    types = tuple(schema) if isinstance(schema, list | tuple) else (schema,)
    if not types or not all(isinstance(name, str) and name in _KEYWORDS_OF_TYPE for name in types):
        raise _unexpected(f"{pointer}/type", schema, f"one of {', '.join(_KEYWORDS_OF_TYPE)}, or several of them")
    return tuple(dict.fromkeys(types))


def _common_types(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Return the types of values that are of a type in ``one`` and of one in ``other``. A number includes the integers."""
    found = [name for name in one if name in other or (name == "integer" and "number" in other)]
    return (*found, *(name for name in other if name == "integer" and "number" in one and name not in found))


def _are_disjoint(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if certainly no value fits both schemas: by type, by fixed values, or by those of a required property."""
    types = [_possible_types(schema) for schema in (one, other)]
    if (types[0] and types[1] and not types[0] & types[1]) or _have_distinct_values(one, other):
        return True
    required_properties: list[Mapping[str, Any]] = []
    for schema in (one, other):
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
            return False
        names = frozenset(key for key in required if isinstance(key, str))
        required_properties.append({key: value for key, value in properties.items() if key in names})
    first, second = required_properties
    return any(_have_distinct_values(first[key], second[key]) for key in first if key in second)


def _have_distinct_values(one: Any, other: Any) -> bool:
    """Return True if both schemas have a few fixed values, none of them an array or an object, and none in common."""
    distinct: list[set[tuple[bool, Any]]] = []
    for values in (_fixed_values(one), _fixed_values(other)):
        if not 0 < len(values) <= MAX_BRANCHES or not all(isinstance(each, _SCALARS) for each in values):
            return False
        distinct.append({(isinstance(each, bool), each) for each in values})  # in Python, true equals 1
    return distinct[0].isdisjoint(distinct[1])


def _possible_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of the schema's values, with integers as numbers; empty if the schema names no type."""
    declared = schema.get("type")
    names = tuple(declared) if isinstance(declared, list | tuple) else (declared,)
    return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))


def _fixed_values(schema: Any) -> list[Any]:
    if not isinstance(schema, Mapping):
        return []
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _has_type(value: object, types: tuple[str, ...]) -> bool:
    """Return True if ``value`` has one of the JSON types."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and float(value).is_integer())
    name = "string" if isinstance(value, str) else "array" if isinstance(value, list | tuple) else "object"
    return name in types


def _has_rounded_integer(value: object) -> bool:
    """Return True if ``value`` is or contains an integer outside :data:`_EXACT_INTEGERS`."""
    unchecked = [value]
    while unchecked:
        each = unchecked.pop()
        if isinstance(each, Mapping | list | tuple):
            unchecked += each.values() if isinstance(each, Mapping) else each
        elif _is_int(each) and each not in _EXACT_INTEGERS:
            return True
    return False


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unexpected(pointer: str, schema: object, expected: str) -> ConfigError:
    return ConfigError(f"the JSON schema has {shown(schema)} at {pointer}; expected {expected}")
