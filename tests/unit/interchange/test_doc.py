"""docs/interchange.md names the columns that Arrow's schema has, in their order and types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from stenograph.interchange.arrow import SCHEMA
from stenograph.interchange.columns import Called, CallRow, ExpertsRow, MessageRow, Row, ToolRow, TurnRow

PAGE = (Path(__file__).parents[3] / "docs" / "interchange.md").read_text()


def columns(name: str, kind: pa.DataType) -> Iterator[tuple[str, str]]:
    """A column and what is in it, by its path."""
    if pa.types.is_struct(kind):
        yield name, "struct"
        for field in kind.fields:
            yield from columns(f"{name}.{field.name}", field.type)
    elif pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        yield name, "list<struct>"
        for field in kind.value_type.fields:
            yield from columns(f"{name}[].{field.name}", field.type)
    else:
        yield name, f"list<{kind.value_type}>" if pa.types.is_list(kind) else str(kind)


def test_the_table_has_the_schemas_columns() -> None:
    section = PAGE.split("## Columns\n")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section, re.MULTILINE)
    assert documented == [column for field in SCHEMA for column in columns(field.name, field.type)]


def test_rows_have_the_schemas_columns() -> None:
    def fields(kind: pa.DataType) -> list[str]:
        return [field.name for field in (kind.value_type if pa.types.is_list(kind) else kind).fields]

    assert list(Row.__annotations__) == SCHEMA.names
    message = SCHEMA.field("messages").type
    call = message.value_type.field("tool_calls").type
    for kind, row in (
        (SCHEMA.field("turns").type, TurnRow),
        (message, MessageRow),
        (SCHEMA.field("tools").type, ToolRow),
        (SCHEMA.field("experts").type, ExpertsRow),
        (call, CallRow),
        (call.value_type.field("function").type, Called),
    ):
        assert fields(kind) == list(row.__annotations__)


def test_columns_that_may_be_null_are_marked() -> None:
    marked = re.findall(r"^\| `([^`.\[]+)` \| `[^`]+` \| yes \|", PAGE, re.MULTILINE)
    assert marked == [name for name, kind in Row.__annotations__.items() if "None" in str(kind)]
