"""Constraints on an answer: a JSON schema, a pattern, choices or a grammar, with bounds. No I/O.

These bounds keep the work of a look small. How long a constraint takes to compile does not follow from its
size, so each is tried as well, in a process that can be stopped (``tenant_sdk.gateway.constraint_checks``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from shared.encoded import UNFIT, UNREADABLE, numbers_fit

SPEC_BYTES = 32 << 10  # of a schema or a grammar
PATTERN_BYTES = 4 << 10
CHOICES, CHOICE_BYTES = 500, 1 << 10
NESTING = 64
MEMBERS = 500  # of one object or list in a schema
STRING_BYTES = 4 << 10  # of one name, pattern or constant in a schema
# A count in a schema is written out while it is compiled; a length is not.
_COUNTS = frozenset({"minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties"})
MAX_ITEMS = 500
_NO_PARAMETERS = {"type": "object", "properties": {}}
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


class ConstraintRefused(ValueError):
    """Why a constraint is not taken, in words for the client."""


class Constraint(NamedTuple):
    """What every text of an answer must match.

    Attributes:
        kind: ``json``, ``regex``, ``choice`` or ``grammar``.
        text: a schema or a list of strings as JSON, a pattern, or a grammar.
    """

    kind: str
    text: str

    def as_field(self) -> dict[str, Any]:
        """As ``structured_outputs`` of a request."""
        return {self.kind: json.loads(self.text) if self.kind == "choice" else self.text}


def read_constraint(response_format: Any, structured_outputs: Any) -> Constraint | None:
    """The constraint of a request, from its fields of these names; None: it has none.

    Raises:
        ConstraintRefused: it is none that this gateway takes.
    """
    constraints = [
        each
        for each in (_from_response_format(response_format), _from_structured_outputs(structured_outputs))
        if each
    ]
    if len(constraints) > 1:
        raise ConstraintRefused("give response_format or structured_outputs, not both")
    if not constraints:
        return None
    _check(constraints[0])
    return constraints[0]


def tool_arguments_constraint(parameters: dict[str, Any] | None) -> Constraint:
    """The arguments of a function, by the schema of its parameters.

    Raises:
        ConstraintRefused: see ``read_constraint``.
    """
    encoded = Constraint("json", _encoded(parameters or _NO_PARAMETERS))
    _check(encoded)
    return encoded


def tool_calls_constraint(functions: Mapping[str, dict[str, Any] | None]) -> Constraint:
    """A list of calls of functions, not empty, by the schemas of their parameters.

    Raises:
        ConstraintRefused: see ``read_constraint``.
    """
    calls, definitions = list[dict[str, Any]](), dict[str, Any]()
    for name, function_parameters in functions.items():
        parameters = dict(function_parameters or _NO_PARAMETERS)
        named = parameters.pop("$defs", {})
        if not isinstance(named, dict) or any(
            definitions.get(key, value) != value for key, value in named.items()
        ):
            raise ConstraintRefused("$defs of tools are objects, and equal where their names are")
        definitions |= named
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
        calls.append({"properties": properties, "required": ["name", "parameters"]})
    schema = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    encoded = Constraint("json", _encoded(schema | ({"$defs": definitions} if definitions else {})))
    _check(encoded)
    return encoded


# Of a schema: schemas by name, lists of them, and single ones; what else is in it is data.
_NAMED_SUBSCHEMAS, _LISTED_SUBSCHEMAS = (
    ("properties", "patternProperties", "$defs", "definitions"),
    ("anyOf", "oneOf", "prefixItems"),
)
_OPEN = {"additionalProperties", "unevaluatedProperties", "allOf", "$ref"}
_SINGLE_SUBSCHEMAS = ("items", "additionalProperties", "contains", "else", "then")
_MEMBER_KEYS = {"properties", "patternProperties", "additionalProperties"}


def close_objects(schema: Any) -> Any:
    """A schema whose objects have no other members than those that it describes, unless it says so.

    Models go on with members of their own where they may. A schema that describes an object in several
    places is left as it is: closed, each of them would forbid the members of the others.
    """
    return schema if _described_in_several_places(schema) else _close_objects(schema)


def _described_in_several_places(schema: Any) -> bool:
    """Whether any object of a schema is described in several places."""
    if not isinstance(schema, dict):
        return False
    places = bool(schema.keys() & _MEMBER_KEYS) + sum(key in schema for key in ("$ref", "anyOf", "oneOf"))
    if isinstance(several := schema.get("allOf"), list):
        places += len(several)
    return places > 1 or any(map(_described_in_several_places, _subschemas(schema)))


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas directly in one."""
    for key in _NAMED_SUBSCHEMAS:
        if isinstance(named := schema.get(key), dict):
            yield from named.values()
    for key in (*_LISTED_SUBSCHEMAS, "allOf"):
        if isinstance(listed := schema.get(key), list):
            yield from listed
    yield from (schema[key] for key in _SINGLE_SUBSCHEMAS if key in schema)


def _close_objects(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    strict = dict(schema)
    for key in _NAMED_SUBSCHEMAS:
        if isinstance(strict.get(key), dict):
            strict[key] = {name: _close_objects(each) for name, each in strict[key].items()}
    for key in _LISTED_SUBSCHEMAS:
        if isinstance(strict.get(key), list):
            strict[key] = [_close_objects(each) for each in strict[key]]
    for key in _SINGLE_SUBSCHEMAS:
        if key in strict:
            strict[key] = _close_objects(strict[key])
    if "properties" in strict and not strict.keys() & _OPEN:
        strict["additionalProperties"] = False
    return strict


def _from_response_format(response_format: Any) -> Constraint | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint("json", '{"type": "object"}')
    schema = response_format.get("json_schema") if isinstance(response_format, dict) else None
    if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return Constraint("json", _encoded(schema["schema"]))
    raise ConstraintRefused(
        'response_format is {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", '
        '"json_schema": {"schema": {...}}}'
    )


def _from_structured_outputs(outputs: Any) -> Constraint | None:
    if outputs is None:
        return None
    if not isinstance(outputs, dict):
        raise ConstraintRefused("structured_outputs is an object")
    outputs = {name: value for name, value in outputs.items() if value is not None}
    if len(outputs) != 1 or not outputs.keys() <= set(_KINDS):
        raise ConstraintRefused(f"structured_outputs has exactly one of {', '.join(_KINDS)}")
    ((kind, value),) = outputs.items()
    if kind == "json_object" and value is True:
        return Constraint("json", '{"type": "object"}')
    if kind == "json" and isinstance(value, dict):
        return Constraint("json", _encoded(value))
    if kind == "choice" and isinstance(value, list) and value and all(isinstance(e, str) for e in value):
        return Constraint("choice", _encoded(value))
    if kind in ("json", "regex", "grammar") and isinstance(value, str) and value:
        return Constraint(kind, value)
    raise ConstraintRefused(f"structured_outputs.{kind} has a value of the wrong type, or an empty one")


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _check(checked: Constraint) -> None:
    """Refuse what is too large to be tried, or cannot be compiled at all."""
    size = len(checked.text.encode())
    if size > (max_bytes := PATTERN_BYTES if checked.kind == "regex" else SPEC_BYTES):
        raise ConstraintRefused(f"the {checked.kind} has {size} bytes; this gateway takes {max_bytes}")
    if "\0" in checked.text:
        raise ConstraintRefused(f"the {checked.kind} has a character of the value 0")
    if checked.kind == "choice":
        choices = json.loads(checked.text)
        longest = max(len(each.encode()) for each in choices)
        if len(choices) > CHOICES or longest > CHOICE_BYTES or "" in choices:
            raise ConstraintRefused(f"choice has at most {CHOICES} texts of 1 to {CHOICE_BYTES} bytes")
    if checked.kind == "json":
        if not numbers_fit(checked.text.encode()):
            raise ConstraintRefused(f"the schema is not taken: {UNFIT}")
        try:
            schema = msgspec.json.decode(checked.text)
        except UNREADABLE as error:
            raise ConstraintRefused("the schema is not JSON") from error
        if not isinstance(schema, dict):
            raise ConstraintRefused("a schema is an object")
        _check_schema(schema)


def _check_schema(schema: dict[str, Any]) -> None:
    followed = set[str]()
    for depth, node in _nodes(schema):
        if depth > NESTING:
            raise ConstraintRefused(f"the schema nests more than {NESTING} objects and lists in one another")
        if isinstance(node, (dict, list)) and len(node) > MEMBERS:
            raise ConstraintRefused(f"an object or a list of the schema has more than {MEMBERS} members")
        strings = [node] if isinstance(node, str) else list(node) if isinstance(node, dict) else []
        if any(len(each) > STRING_BYTES for each in strings):
            raise ConstraintRefused(f"a text in the schema has more than {STRING_BYTES} characters")
        if isinstance(node, dict):
            for name in _COUNTS & node.keys():
                if isinstance(node[name], (int, float)) and not node[name] <= MAX_ITEMS:
                    raise ConstraintRefused(f"{name} of a schema is at most {MAX_ITEMS}")
            _follow(schema, node, followed)


def _nodes(schema: Any) -> Iterator[tuple[int, Any]]:
    """All that is in a schema, with its depth; nothing below ``NESTING`` is opened."""
    waiting = [(0, schema)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node
        if isinstance(node, (dict, list)) and depth <= NESTING:
            children = node.values() if isinstance(node, dict) else node
            waiting += [(depth + 1, child) for child in children]


def _follow(schema: dict[str, Any], node: dict[str, Any], followed: set[str]) -> None:
    """Whether the references that begin at a node lead to a schema, and not in a circle.

    Args:
        followed: references for which that is so; those of this node are added.
    """
    seen = set[str]()
    while isinstance(node, dict) and isinstance(reference := node.get("$ref"), str):
        if reference in followed:
            break
        if reference in seen:
            raise ConstraintRefused("a $ref of the schema leads back to itself")
        if not reference.startswith("#"):
            raise ConstraintRefused("a $ref of a schema leads into the same schema: it begins with #")
        seen.add(reference)
        target: Any = schema
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target.get(part) if isinstance(target, dict) else None
        if target is None:
            break  # of another form, or to nothing: compiling it tells
        node = target
    followed |= seen
