"""Typed reading of wire JSON: what is wrong is named by its whole path."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, Self, TypeVar

import orjson

from stenograph.errors import RequestError

T = TypeVar("T")


class Growing(Protocol):
    def copy(self) -> Self:
        """One that grows on by itself."""
        ...


G = TypeVar("G", bound=Growing)

_MAX_INTEGER = 2**31 - 1  # what every engine's tensors hold
_MAX_SCHEMA_DEPTH = 128  # JSON is written to 254 levels; a record, an export and a template put a few around it


def read_body(body: bytes) -> Fields:
    """The object that a request's body is. Raises RequestError (400), as everything here does."""
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise RequestError(f"the body is not JSON: {e}") from e
    return Fields(typed(raw, dict, "the body", "an object"))


@dataclass(frozen=True, slots=True)
class Fields:
    """An object; `path` is what stands before its fields' names in an error. Null is absent."""

    values: Mapping[str, Any]
    path: str = field(default="")

    def get(self, name: str, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self.values.get(name)
        return None if value is None else typed(value, kind, self.path + name, expected)

    def text(self, name: str) -> str | None:
        """A text, or None: where clients put other things, they mean nothing by it."""
        value = self.values.get(name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool:
        return bool(self.get(name, bool, "true or false"))

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name, (int, float), "a number")
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise invalid(self.path + name, f"must be between {low:g} and {high:g}, got {value}")
        return None if value is None else float(value)

    def integer(self, name: str, low: int, high: int = _MAX_INTEGER) -> int | None:
        value = self.get(name, int, "an integer")
        if value is not None and not low <= value <= high:
            raise invalid(self.path + name, f"must be between {low} and {high}, got {value}")
        return value

    def object(self, name: str, expected: str = "an object") -> Fields:
        """The object under `name`; an empty one where there is none."""
        return Fields(self.get(name, dict, expected) or {}, f"{self.path}{name}.")

    def objects(self, name: str) -> list[Fields]:
        """The objects in the list under `name`."""
        raw = self.get(name, list, "a list") or []
        return [self.item(name, i, value) for i, value in enumerate(raw)]

    def item(self, name: str, i: int, value: Any) -> Fields:
        """`value` as the object that stands at `i` of the list under `name`."""
        path = f"{self.path}{name}[{i}]"
        return Fields(typed(value, dict, path, "an object"), f"{path}.")

    # What is read through these three may be given again, the same objects, where it comes again: see `seen`.

    def fold(self, name: str, read: Callable[[Fields], T], begin: Callable[[], G], add: Callable[[G, T], object]) -> G:
        """What `begin` gives, with all added that `read` makes of each object in the list under `name`; never None.

        What was added of an earlier list may be gone on with, where this one begins as that did.
        """
        built = begin()
        for one in self.objects(name):
            add(built, read(one))
        return built

    def whole(self, name: str, read: Callable[..., T], *also: Any) -> T:
        """What `read` makes of the field `name`, all of this object that it is given, and of `also`; never None."""
        return read(Fields({name: self.values.get(name)}, self.path), *also)

    def once(self, make: Callable[..., T], *of: Any) -> T:
        """What `make` makes of what was read before; never None."""
        return make(*of)

    def each(self, name: str, read: Callable[[Fields], T]) -> tuple[T, ...]:
        """What `read` makes of each object in the list under `name`; never None."""
        return tuple(self.fold(name, read, list[T], list.append))

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of them, none empty."""
        value = self.values.get(name)
        texts = [value] if isinstance(value, str) else (value or [])
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise invalid(self.path + name, f"must be a text or a list of texts, got {shown(value)}")
        return tuple(texts)

    def schema(self, name: str) -> Mapping[str, Any] | None:
        """A JSON schema that can be written out again, also inside of other JSON."""
        schema = self.get(name, dict, "a JSON schema")
        if is_deeper(schema, _MAX_SCHEMA_DEPTH):
            raise invalid(self.path + name, f"must be a JSON schema of at most {_MAX_SCHEMA_DEPTH} levels; flatten it")
        return schema

    def required_schema(self, name: str) -> Mapping[str, Any]:
        """A schema that must be there."""
        schema = self.schema(name)
        if schema is None:
            raise invalid(self.path + name, "is missing")
        return schema

    def name(self, name: str) -> str:
        """A text that must be there."""
        value = self.get(name, str, "a text")
        if not value:
            raise invalid(self.path + name, "is missing")
        return value


@dataclass(frozen=True, slots=True)
class Joined:
    """Blocks of text as one, and where in it each but the first begins."""

    text: str
    joints: tuple[int, ...] = ()

    @staticmethod
    def of(texts: Sequence[str], between: str = "") -> Joined:
        """Empty blocks leave no trace: clients drop them or not."""
        texts = [text for text in texts if text]
        starts = accumulate(len(text) + len(between) for text in texts[:-1])
        return Joined(between.join(texts), tuple(starts))


def typed(value: Any, kind: type | tuple[type, ...], path: str, expected: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise invalid(path, f"must be {expected}, got {shown(value)}")
    return value


def invalid(path: str, what: str) -> RequestError:
    path = path.removesuffix(".")
    return RequestError(f"{path}: {what}", param=path)


def is_deeper(value: object, levels: int) -> bool:
    """Whether objects and lists in `value` stand in more than `levels` of each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(is_deeper(one, levels - 1) for one in inner))


def shown(value: Any) -> str:
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # it reads a thousand levels and writes a quarter of that
        return "something nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."
