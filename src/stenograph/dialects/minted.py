"""What the gateway hands out and reads back, ids and sealed texts: ours say whose they are, anything else is None."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

import orjson

_MARK = b"steno1"  # whose it is and its version; six bytes, so that every seal begins with the same eight characters
_START = base64.urlsafe_b64encode(_MARK).decode()


@dataclass(frozen=True, slots=True)
class Sealed:
    """What a seal holds: the turn that it was handed out with, and that turn's reasoning."""

    turn: str
    reasoning: str


def choice_names(name: str, num_choices: int) -> tuple[str, ...]:
    """What the turns that answer one request are named: the first as the request is."""
    return (name, *(f"{name}_{choice}" for choice in range(1, num_choices)))


def turn_id(name: str) -> str:
    """The id in the record of the turn that an id given out names."""
    return f"turn_{name}"


def turn_name(id: str) -> str:
    """The name of the turn that has this id."""
    return id.removeprefix("turn_")


def call_id(name: str, index: int) -> str:
    """The id of a turn's call."""
    return f"call_{name}_{index}"


def turn_of_call(id: str) -> str | None:
    """The turn that made a call, by its id; None where it is not one of ours."""
    ours = _CALL.fullmatch(id)
    return turn_id(ours[1]) if ours else None


_CALL = re.compile(r"call_([0-9a-f]{16}(?:_[0-9]+)?)_[0-9]+")  # a further choice has its number in its name


def seal(turn: str, reasoning: str) -> str:
    """A text for a client to keep and send back; it is opaque, not secret."""
    return base64.urlsafe_b64encode(_MARK + orjson.dumps([turn, reasoning])).decode()


def unseal(text: str) -> Sealed | None:
    """What `seal` put into `text`; None where it is no seal of ours, or no longer whole."""
    if not text.startswith(_START):
        return None
    try:
        raw = base64.b64decode(text, altchars=b"-_", validate=True)
        held = orjson.loads(raw.removeprefix(_MARK))
    except (binascii.Error, ValueError):  # orjson's error and what text outside ASCII gives are ValueErrors
        return None
    match held:
        case [str(turn), str(reasoning)]:
            return Sealed(turn, reasoning)
        case _:
            return None
