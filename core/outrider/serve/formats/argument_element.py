"""ArgumentElement: one element of a tool call whose arguments are elements in elements, as MiniMax M3 writes them."""

from __future__ import annotations

import json
from typing import Any

from outrider.serve.formats.json_text import escape_text, schema_types, value_to_json


class ArgumentElement:
    """An open element, which becomes an object, a list or a single value in JSON. The methods return pieces of the JSON."""

    def __init__(self, name: str, schema: Any) -> None:
        self.name = name
        self._schema = schema if isinstance(schema, dict) else {}
        self._types = schema_types(schema)
        self._brackets = ""
        self._has_quote = False
        self.is_text = self._types == {"string"}
        """True if the schema allows only text, which is reported while the model writes it."""
        self.pending = ""
        """Text of a value of another type, which is reported at its end."""

    def add_text(self, text: str) -> str:
        """Append ``text`` to the value."""
        if not self.is_text or not text:
            self.pending += text
            return ""
        quote, self._has_quote = "" if self._has_quote else '"', True
        return quote + escape_text(text)

    def open_child(self, name: str) -> tuple[str, ArgumentElement]:
        """Begin an inner element. Elements with the name ``item`` make a list, others an object."""
        before = ", " if self._brackets else ""
        if not self._brackets:
            self._brackets = "[]" if name == "item" and self._types <= {"array", "null"} else "{}"
            before = self._brackets[0]
        if self._brackets == "[]":
            return before, ArgumentElement(name, self._schema.get("items"))
        properties = self._schema.get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        return f"{before}{json.dumps(name)}: ", ArgumentElement(name, schema)

    def close(self) -> str:
        """Return the text that ends the element: the whole value if no piece of the value was returned before."""
        if self._brackets:
            return self._brackets[1]
        if self.is_text:
            return '"' if self._has_quote else '""'
        empty = {"array": "[]", "object": "{}"}
        if not self.pending.strip():
            return next((text for kind, text in empty.items() if kind in self._types), '""')
        return value_to_json(self.pending, self._types)
