"""JSON schemas as far as they can be enforced while text is generated. What can't be is an error, never overlooked.

Taken: ``type`` (one or several), ``enum``, ``const``, ``$ref`` within the schema, ``anyOf``, ``allOf`` of one; ``oneOf`` of
schemas that no value can fit together. Of numbers ``minimum``, ``maximum``, ``exclusiveMinimum``, ``exclusiveMaximum``. Of
strings ``minLength`` and ``maxLength``, or ``pattern`` (for the whole string), or ``format``. Of arrays ``items``,
``prefixItems``, ``minItems``, ``maxItems``. Of objects ``properties``, ``required``, ``additionalProperties``,
``minProperties``, ``maxProperties``. Descriptions, titles, defaults and examples change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outrider.device.errors import ConfigError
from outrider.engine.requests.patterns import FORMATS, written
from outrider.errors import shown

MAX_DEPTH, MAX_NODES, MAX_PROPERTIES, MAX_BRANCHES, MAX_COUNT = 64, 4096, 512, 128, 1 << 16
"""Schemas within each other, schemas in all, properties of an object, schemas that one of must hold, and what a length or a
number of items may be."""

_SAYS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id")
)
_KEPT = ("$defs", "definitions")
_SHAPES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_OF_TYPE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "null": frozenset(),
        "boolean": frozenset(),
        "integer": _NUMBERS,
        "number": _NUMBERS,
        "string": frozenset(("minLength", "maxLength", "pattern", "format")),
        "array": frozenset(("items", "prefixItems", "minItems", "maxItems", "uniqueItems")),
        "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
    }
)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def supported_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema in a form whose every word is enforced. Raises :class:`ConfigError` for what can't be, with its place."""
    return dict(_Reader(schema).read(schema, "#", 0))


class _Reader:
    """Reads one schema. ``root``: what references are looked up in."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._nodes = 0

    def read(self, given: Any, place: str, depth: int) -> Any:
        """One schema within it."""
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise ConfigError(
                f"the JSON schema has more than {MAX_NODES} schemas, or more than {MAX_DEPTH} within each other, at {place}"
            )
        if given is True:
            return {}
        if not isinstance(given, Mapping):
            raise _wrong(place, given, "a schema: an object, or true")
        said = {key: value for key, value in given.items() if key not in _SAYS}
        kept = {key: self._definitions(said.pop(key), f"{place}/{key}", depth) for key in _KEPT if key in said}
        shapes = [key for key in _SHAPES if key in said]
        return self._shape(shapes[0], said, place, depth) | kept if shapes else self._plain(said, place, depth) | kept

    def _definitions(self, given: Any, place: str, depth: int) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            raise _wrong(place, given, "an object of schemas")
        return {name: self.read(schema, f"{place}/{name}", depth + 1) for name, schema in given.items()}

    # -- references, lists of values and of schemas ------------------------------------------------------------------

    def _shape(self, key: str, said: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        value = said.pop(key)
        types = _types(said.pop("type"), place) if "type" in said and key in ("const", "enum") else None
        for other in said:
            raise ConfigError(
                f"the JSON schema has {other!r} beside {key!r} at {place}; they can't be enforced together: put them into one"
            )
        if key == "$ref":
            self._look_up(value, place)
            return {key: value}
        if key in ("const", "enum"):
            values = [value] if key == "const" else value
            if not isinstance(values, list | tuple) or not values:
                raise _wrong(f"{place}/{key}", value, "a list of values")
            for each in values:
                if types is not None and not _is(each, types):
                    raise ConfigError(f"the JSON schema has {shown(each)} at {place}/{key}, which isn't of its type")
            return {key: value}
        if not isinstance(value, list | tuple) or not value:
            raise _wrong(f"{place}/{key}", value, "a list of schemas")
        if key == "allOf" and len(value) > 1:
            raise ConfigError(f"the JSON schema has {len(value)} schemas in 'allOf' at {place}; write them as one")
        if len(value) > MAX_BRANCHES:
            raise _wrong(f"{place}/{key}", value, f"at most {MAX_BRANCHES} schemas")
        if key == "oneOf":
            self._check_apart(value, place)
        branches = [self.read(each, f"{place}/{key}/{index}", depth + 1) for index, each in enumerate(value)]
        return branches[0] if len(branches) == 1 else {"anyOf": branches}

    def _look_up(self, reference: Any, place: str) -> Any:
        """What a reference names; raises for one that names nothing here."""
        found: Any = self._root
        parts = reference.split("/") if isinstance(reference, str) else [""]
        for part in parts[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list | tuple) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                found = found.get(part) if isinstance(found, Mapping) else None
        if parts[0] != "#" or found is None:
            raise _wrong(f"{place}/$ref", reference, "'#', or '#/…' that names a schema in this one")
        return found

    def _check_apart(self, branches: Any, place: str) -> None:
        """Raise unless no value can fit two of the schemas."""
        seen = [self._resolved(each, place) for each in branches]
        for index, one in enumerate(seen):
            for other in seen[index + 1 :]:
                if not _apart(one, other):
                    raise ConfigError(
                        f"the JSON schema has 'oneOf' at {place}, and a value may fit several of its schemas; use 'anyOf', "
                        "or give each another type, or a required property with a 'const' of its own"
                    )

    def _resolved(self, schema: Any, place: str) -> Mapping[str, Any]:
        for _ in range(MAX_DEPTH):
            if isinstance(schema, Mapping) and "$ref" in schema:
                schema = self._look_up(schema["$ref"], place)
        return schema if isinstance(schema, Mapping) else {}

    # -- types ---------------------------------------------------------------------------------------------------------

    def _plain(self, said: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        """A schema with a type, or with words that say which."""
        if not said:
            return {}
        if "type" in said:
            types = _types(said.pop("type"), place)
        else:
            unsaid = ("number", "string", "array", "object")
            types = tuple(name for name in unsaid if any(key in _OF_TYPE[name] for key in said))[:1]
        known = frozenset().union(*(_OF_TYPE[name] for name in types)) if types else frozenset()
        for key in said:
            if key not in known:
                raise ConfigError(
                    f"the JSON schema has {key!r} at {place}, which can't be enforced there; leave it out, or write it "
                    "otherwise"
                )
        parts = [self._of_type(name, {k: v for k, v in said.items() if k in _OF_TYPE[name]}, place, depth) for name in types]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _of_type(self, name: str, said: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        for key in _COUNTS:
            if key in said and not (_whole(said[key]) and 0 <= said[key] <= MAX_COUNT):
                raise _wrong(f"{place}/{key}", said[key], f"a whole number of 0 to {MAX_COUNT}")
        for key in _NUMBERS & said.keys():
            if not isinstance(said[key], int | float) or isinstance(said[key], bool) or abs(said[key]) > 1e15:
                raise _wrong(f"{place}/{key}", said[key], "a number of at most 1e15")
        made: dict[str, Any] = {"type": name, **said}
        if name == "string":
            self._string(made, place)
        if name == "array":
            self._array(made, place, depth)
        if name == "object":
            self._object(made, place, depth)
        return made

    def _string(self, made: dict[str, Any], place: str) -> None:
        ways = [way for way in ("pattern", "format") if way in made]
        if len(ways) > 1 or (ways and ("minLength" in made or "maxLength" in made)):
            raise ConfigError(
                f"the JSON schema has {ways[0]!r} beside other limits of a string at {place}; only one is enforced: leave "
                "the others out"
            )
        for way in ways:
            if not isinstance(made[way], str) or len(made[way]) > MAX_COUNT:
                raise _wrong(f"{place}/{way}", shown(made[way]), "a text")
        least, most = made.pop("minLength", 0), made.pop("maxLength", None)
        if "format" in made:
            name = made.pop("format")
            if name not in FORMATS:
                raise _wrong(f"{place}/format", name, f"one of {', '.join(FORMATS)}")
            made["pattern"] = FORMATS[name]
        elif least or most is not None:
            if most is not None and least > most:
                raise _wrong(f"{place}/minLength", least, f"at most maxLength, {most}")
            made["pattern"] = f'[^"]{{{least},{"" if most is None else most}}}'
        if "pattern" in made:
            made["pattern"] = written(made["pattern"], in_json=True)

    def _array(self, made: dict[str, Any], place: str, depth: int) -> None:
        if made.pop("uniqueItems", False) is not False:
            raise ConfigError(f"the JSON schema has 'uniqueItems' at {place}, which can't be enforced; leave it out")
        if "prefixItems" in made:
            first = made["prefixItems"]
            if not isinstance(first, list | tuple) or not first:
                raise _wrong(f"{place}/prefixItems", first, "a list of schemas")
            made["prefixItems"] = [
                self.read(each, f"{place}/prefixItems/{index}", depth + 1) for index, each in enumerate(first)
            ]
        # Without a word about them, items behind the first ones are left out.
        if made.get("items", "prefixItems" not in made) is not False:
            made["items"] = self.read(made.get("items", True), f"{place}/items", depth + 1)

    def _object(self, made: dict[str, Any], place: str, depth: int) -> None:
        properties, required = made.get("properties", {}), made.get("required", [])
        if not isinstance(properties, Mapping) or len(properties) > MAX_PROPERTIES:
            raise _wrong(f"{place}/properties", properties, f"an object of at most {MAX_PROPERTIES} schemas")
        if not isinstance(required, list | tuple) or not all(isinstance(each, str) for each in required):
            raise _wrong(f"{place}/required", required, "a list of names")
        more = made.get("additionalProperties", not properties)
        unnamed = next((each for each in required if each not in properties), None)
        if unnamed is not None:
            raise ConfigError(f"the JSON schema requires {unnamed!r} at {place}, which its 'properties' don't have; add it")
        made["properties"] = {
            key: self.read(each, f"{place}/properties/{key}", depth + 1) for key, each in properties.items()
        }
        if not properties:
            del made["properties"]
        # A name may be written twice, and the last one counts: so either the names that are known, or any, all alike.
        made["additionalProperties"] = False if properties or more is False else self._any(more, place, depth)
        if not properties and made.get("minProperties", 0) > 1:
            raise ConfigError(
                f"the JSON schema has 'minProperties' {made['minProperties']} at {place} without 'properties'; more than 1 "
                "can't be enforced"
            )

    def _any(self, more: Any, place: str, depth: int) -> Any:
        schema = self.read(more, f"{place}/additionalProperties", depth + 1)
        return schema if schema else True


def _types(given: Any, place: str) -> tuple[str, ...]:
    types = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not types or not all(isinstance(name, str) and name in _OF_TYPE for name in types):
        raise _wrong(f"{place}/type", given, f"one of {', '.join(_OF_TYPE)}, or several of them")
    return tuple(dict.fromkeys(types))


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether it's certain that no value fits both."""
    kinds = [_kinds(each) for each in (one, other)]
    if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
        return True
    named: list[Mapping[str, Any]] = []
    for each in (one, other):
        properties, required = each.get("properties"), each.get("required")
        if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
            return False
        needed = frozenset(key for key in required if isinstance(key, str))
        named.append({key: schema for key, schema in properties.items() if key in needed})
    for key in named[0]:
        if key in named[1]:
            values = [_values(each[key]) for each in named]
            if max(map(len, values)) > MAX_BRANCHES:
                return False
            if values[0] and values[1] and not any(value in values[1] for value in values[0]):
                return True
    return False


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a value of the schema may have; empty: it isn't certain."""
    given = schema.get("type")
    names = tuple(given) if isinstance(given, list | tuple) else (given,)
    return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))


def _values(schema: Any) -> list[Any]:
    if not isinstance(schema, Mapping):
        return []
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _is(value: object, types: tuple[str, ...]) -> bool:
    """Whether a value has one of the types."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean") in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and float(value).is_integer())
    named = "string" if isinstance(value, str) else "array" if isinstance(value, list | tuple) else "object"
    return named in types


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(place: str, given: object, expected: str) -> ConfigError:
    return ConfigError(f"the JSON schema has {shown(given)} at {place}; expected {expected}")
