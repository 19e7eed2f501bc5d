"""Tools of the Messages protocol: what a client runs is a function in the prompt, whoever wrote its schema.

Anthropic's models know some tools by their type alone. Those that a client runs are told to any model as the functions
that they are, or refused: an agent would never learn that its only tool is gone. Those that Anthropic's servers run are
left out and noted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from stenograph.dialects.fields import Fields, invalid, shown
from stenograph.types import Tool

_VERSION = re.compile(r"_(\d{8})$")  # what ends the type of a tool of Anthropic's


def read_tools(fields: Fields) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The tools that a client runs, and notes on those that are left out.

    Deferred ones are among them: added later, they would change the prompt's start.
    """
    tools: list[Tool] = []
    notes: list[str] = []
    for tool in fields.objects("tools"):
        kind, schema = tool.text("type") or "custom", tool.schema("input_schema")
        if schema is not None:
            tools.append(Tool(tool.name("name"), tool.get("description", str, "a text") or "", schema))
        elif kind == "custom":
            raise invalid(f"{tool.path}input_schema", "is missing")
        else:
            tools += _known_by_type(tool, kind, notes)
    return tuple(tools), tuple(notes)


def _known_by_type(tool: Fields, kind: str, notes: list[str]) -> list[Tool]:
    family = _VERSION.sub("", kind)
    if family in _FUNCTIONS:
        version = _VERSION.search(kind)
        description, parameters = _FUNCTIONS[family](version[1] if version else "")
        return [Tool(tool.name("name"), description, parameters)]
    if family in _CLIENTS_OWN:
        told = f"the model knows no tool of type {shown(kind)}; declare it as a function with input_schema"
        raise invalid(f"{tool.path}type", told)
    notes.append(f"left_out:{family[:64]}")  # Anthropic's servers run it, or know what it is
    return []


# --- the functions, with the parameters that Anthropic's documentation gives them ---------------------------------


def _function(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(told: str) -> dict[str, Any]:
    return {"type": "string", "description": told}


def _one_of(*commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(commands), "description": "What to do."}


_LINE = {"type": "integer", "description": "For insert: the line after which the text goes, 0 for the file's start."}
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view of a file: first and last line to show, counted from 1; -1 is the file's end.",
}


def _bash(version: str) -> tuple[str, dict[str, Any]]:
    told = "Runs a command in a bash shell that goes on from one call to the next."
    restart = {"type": "boolean", "description": "Whether to start the shell anew; no command is needed then."}
    return told, _function([], command=_text("The command to run."), restart=restart)


def _text_editor(version: str) -> tuple[str, dict[str, Any]]:
    """Newer versions cannot undo, and the newest has its own name for the text that it inserts."""
    commands = ["view", "create", "str_replace", "insert"]
    new, inserted = "For str_replace: the text to put there.", {}
    if version >= "20250728":
        inserted = {"insert_text": _text("For insert: the text to insert.")}
    else:
        new += " For insert: the text to insert."
    if version < "20250429":
        commands.append("undo_edit")
    return "Shows, makes and changes text files.", _function(
        ["command", "path"],
        command=_one_of(*commands),
        path=_text("The file or directory."),
        file_text=_text("For create: what the file holds."),
        old_str=_text("For str_replace: the text to replace; it must stand in the file exactly once."),
        new_str=_text(new),
        insert_line=_LINE,
        **inserted,
        view_range=_RANGE,
    )


def _memory(version: str) -> tuple[str, dict[str, Any]]:
    return "Reads and keeps notes in files under /memories, which outlast the conversation.", _function(
        ["command"],
        command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_text("The file or directory; every command but rename needs it."),
        file_text=_text("For create: what the file holds."),
        old_str=_text("For str_replace: the text to replace; it must stand in the file exactly once."),
        new_str=_text("For str_replace: the text to put there."),
        insert_line=_LINE,
        insert_text=_text("For insert: the text to insert."),
        old_path=_text("For rename: the path as it is."),
        new_path=_text("For rename: the path as it will be."),
        view_range=_RANGE,
    )


_FUNCTIONS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
}
_CLIENTS_OWN = ("computer", "computer_toolset", "browser_toolset")  # they answer with pictures
