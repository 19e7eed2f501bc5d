"""The fields that say how to sample mean the same in every protocol, also where only this kind of server reads them."""

from __future__ import annotations

from typing import Any

from stenograph.dialects.fields import Fields, invalid

_CONSTRAINTS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
_IGNORED = ("logit_bias", "chat_template_kwargs", "min_tokens", "stop_token_ids", "bad_words", "ignore_eos")
_MAX_SEED = 2**63 - 128  # 64 bits hold it, and those of all choices that a request may have, which follow it


def read_sampling(fields: Fields, *, stop: str, max_tokens: tuple[str, ...]) -> dict[str, Any]:
    """The values given, by Sampling's names. `stop` and `max_tokens` name what the protocol calls them."""
    top_k = fields.integer("top_k", -1)
    asked = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 1e-9, 1),
        "top_k": None if top_k is None else max(top_k, 0),
        "min_p": fields.number("min_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 1e-9, 100),
        "max_tokens": next((limit for name in max_tokens if (limit := fields.integer(name, 1))), None),
        "seed": fields.integer("seed", -(2**63), _MAX_SEED),
        "stop": fields.texts(stop) or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def refuse_constraints(fields: Fields, instead: str) -> None:
    """What would bind the answer in ways that are not read here; `instead` names the field that is."""
    for name in _CONSTRAINTS:
        if fields.values.get(name) is not None:
            raise invalid(name, f"is not read here; give a JSON schema as {instead}")


def refuse_choices(fields: Fields) -> None:
    """More than one choice, where the protocol's answer holds one."""
    if (fields.integer("n", 1) or 1) > 1:
        raise invalid("n", f"must be 1, got {fields.values['n']}; this protocol's answer is one, ask again for another")


def ignored(fields: Fields, *paths: str) -> list[str]:
    """Notes on what was asked and is not done, though nothing breaks by it: `paths` are the protocol's own fields."""
    return [f"ignored:{path}" for path in (*_IGNORED, *paths) if _given(fields, path)]


def _given(fields: Fields, path: str) -> bool:
    value: Any = fields.values
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return bool(value)
