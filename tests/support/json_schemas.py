"""Random JSON schemas whose every value is small, and what a value of one is: a validator of a few lines."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_NAMES = st.text('ab{"\\é\n', min_size=1, max_size=3)
_LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 'a"b'}, {"enum": [1, "x", None]}]),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-99, 99),
        st.integers(0, 200),
    ),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    st.just({"type": "string", "pattern": "^[a-f]{2}-[0-9]+$", "maxLength": 6}),
)


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    return st.recursive(_LEAVES, lambda inner: st.one_of(_arrays(inner), _objects(inner), _unions(inner)), max_leaves=5)


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether `value` is what a schema of `schemas` asks for."""
    if "const" in schema:
        return bool(value == schema["const"])
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(conforms(value, inner) for inner in schema["anyOf"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema["maxLength"]
        case "array":
            fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(conforms(item, schema["items"]) for item in value)
        case "object":
            if not isinstance(value, dict) or not set(schema["required"]) <= set(value) <= set(schema["properties"]):
                return False
            return all(conforms(item, schema["properties"][name]) for name, item in value.items())
    raise AssertionError(f"schemas makes no {schema}")


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, most: {"type": "array", "items": items, "minItems": most // 2, "maxItems": most},
        inner,
        st.integers(0, 3),
    )


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda properties, is_all_required: {
            "type": "object",
            "properties": properties,
            "required": list(properties) if is_all_required else [],
            "additionalProperties": False,
        },
        st.dictionaries(_NAMES, inner, max_size=3),
        st.booleans(),
    )


def _unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=2))
