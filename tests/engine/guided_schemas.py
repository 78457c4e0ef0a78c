"""Drawn JSON schemas, of what can be enforced, and what an output must be to fit one."""

import json

import jsonschema
from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "name", "is ok", "x-1", "größe", 'q"', "items", "type"])
WORDS = st.text("abc é\"\\\n'{}[]:,😀", max_size=5)
PATTERNS = st.sampled_from(
    ["^[a-z]{1,4}$", "[0-9]+-[^0-9]", "(ab|cd)*e?", "\\w\\s\\d", ".{2,5}", "^(yes|no)$", "[^a-z]{1,3}"]
)
FORMATS = st.sampled_from(["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"])


def limits(least, most, values):
    """None, one or both limits, the lower one first."""

    def chosen(pair):
        low, high = sorted(pair[0])
        return {name: value for name, value, on in ((least, low, pair[1]), (most, high, pair[2])) if on}

    return st.tuples(st.tuples(values, values), st.booleans(), st.booleans()).map(chosen)


def joined(*parts):
    return st.tuples(*parts).map(lambda found: {key: value for part in found for key, value in part.items()})


SCALARS = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}, {"const": {"k": [1, "é\n"]}}]),
    joined(st.just({"type": "integer"}), limits("minimum", "maximum", st.integers(-10_000, 10_000))),
    joined(st.just({"type": "number"}), limits("minimum", "maximum", st.integers(-400, 400).map(lambda x: x / 4))),
    st.integers(-50, 50).map(lambda x: {"type": "integer", "exclusiveMinimum": x, "exclusiveMaximum": x + 5}),
    joined(st.just({"type": "string"}), limits("minLength", "maxLength", st.integers(0, 9))),
    PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern}),
    FORMATS.map(lambda name: {"type": "string", "format": name}),
    st.lists(st.one_of(WORDS, st.integers(-9, 9), st.none(), st.booleans()), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
)


def composed(inner):
    arrays = joined(
        st.just({"type": "array"}), inner.map(lambda x: {"items": x}), limits("minItems", "maxItems", st.integers(0, 3))
    )
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda first: {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
    )

    def of(pair):
        properties, chosen = pair
        return {
            "type": "object",
            "properties": properties,
            "required": [key for key, on in zip(properties, chosen, strict=False) if on],
            "additionalProperties": False,
        }

    objects = st.tuples(
        st.dictionaries(NAMES, inner, min_size=1, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4)
    )
    maps = inner.map(lambda x: {"type": "object", "additionalProperties": x, "maxProperties": 2})
    either = st.lists(inner, min_size=2, max_size=3).map(lambda branches: {"anyOf": branches})
    return st.one_of(objects.map(of), objects.map(of), arrays, tuples, maps, either)


SCHEMAS = composed(st.recursive(SCALARS, composed, max_leaves=6))


def check_fits(text, schema):
    """Raise unless the text is JSON that the schema accepts, formats included."""

    jsonschema.validate(
        json.loads(text),
        schema,
        cls=jsonschema.Draft202012Validator,
        format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
    )
