"""Plain-text markup by transformers' response parser: what is no well-formed call stays in content as written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stenograph.errors import ConfigError
from stenograph.rendering.arguments import compact, read_call
from stenograph.rendering.base import Delta
from stenograph.rendering.detokenize import Trimmed
from stenograph.types import Reply, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_parsing.response_parser import ResponseParser

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = "tool_calls"
HERMES: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"content": "text"},
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        _CALLS: {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
    },
}


def load_schema(path: Path | None) -> Mapping[str, Any]:
    """The response schema in `path` (transformers' `response_template`); Hermes markers where there is none."""
    if path is None:
        return HERMES
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"model.response_schema: cannot read {path}: {e}; give the path of a JSON file") from e
    return schema


class ResponseReader:
    """Reads replies by one schema. `incremental`: text may be shown while it arrives."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, schema: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        try:
            self._schema: dict[str, Any] = deepcopy(dict(schema))
            tokenizer.get_response_parser(self._schema, prefix="")
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise ConfigError(
                f"model.response_schema: {e}; write a `response_template` as transformers takes it"
            ) from e
        self.incremental = _is_plain(self._schema["fields"])
        if self.incremental:
            # transformers' own JSON parser raises on a malformed call and forgets how a good one was spelled, so it
            # only finds the calls here and `read_call` reads them.
            calls = self._schema["fields"].get(_CALLS)
            if calls is not None:
                calls["content"], calls["content_args"] = "text", {"strip": False}

    def unclosed(self, prefix: str) -> str:
        """The marker that ends the reasoning which `prefix` leaves open; empty where it leaves none."""
        for name in _REASONING:
            field = self._schema["fields"].get(name, {})
            begin, end = field.get("open"), field.get("close")
            if isinstance(begin, str) and isinstance(end, str) and prefix.rfind(begin) > prefix.rfind(end):
                return end
        return ""

    def start(self, prefix: str) -> Reading:
        """Read a turn piece by piece; `prefix` is the generation prompt, which may have opened the reasoning."""
        return Reading(self._parser(prefix), self._schema["fields"])

    def read(self, text: str, prefix: str) -> Reply:
        if self.incremental:
            reading = self.start(prefix)
            reading.feed(text)
            reading.finish()
            return reading.reply
        parser = self._parser(prefix)
        try:
            parser.feed(text)
            message, _ = parser.finalize()
            return _reply(message)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return Reply(text.strip())  # what a model wrote at random need not follow any schema

    def _parser(self, prefix: str) -> ResponseParser:
        return self._tokenizer.get_response_parser(self._schema, prefix=prefix)


class Reading:
    """One turn as it arrives. Calls that do not parse, and those cut off, are content the way they were written."""

    def __init__(self, parser: ResponseParser, fields: Mapping[str, Any]) -> None:
        self._parser = parser
        self._fields = fields
        self._content, self._reasoning = Trimmed(), Trimmed()
        self._shown: list[Delta] = []
        self._call: list[str] = []
        self._calls: list[ToolCall] = []
        self._num_malformed = 0

    def feed(self, text: str) -> Delta:
        return self._take(self._parser.feed(text), closed=True)

    def finish(self) -> Delta:
        _, events = self._parser.finalize()
        return self._take(events, closed=False)

    @property
    def reply(self) -> Reply:
        content = "".join(delta.content for delta in self._shown)
        reasoning = "".join(delta.reasoning for delta in self._shown)
        return Reply(content, reasoning, tuple(self._calls), self._num_malformed)

    def _take(self, events: list[dict[str, Any]], closed: bool) -> Delta:
        content: list[str] = []
        reasoning: list[str] = []
        for event in events:
            kind, field = event["type"], event["field"]
            if field == _CALLS:
                if kind == "region_chunk":
                    self._call.append(event["text"])
                elif kind == "region_close":
                    content.append(self._content.push(self._end_call(closed)))
            elif kind == "region_chunk":
                if field == "content":
                    content.append(self._content.push(event["text"]))
                else:
                    reasoning.append(self._reasoning.push(event["text"]))
        delta = Delta("".join(content), "".join(reasoning))
        self._shown.append(delta)
        return delta

    def _end_call(self, closed: bool) -> str:
        """Keep the call, or return its text where it is none."""
        text = "".join(self._call)
        self._call.clear()
        call = read_call(text) if closed else None
        if call is not None:
            self._calls.append(call)
            return ""
        self._num_malformed += 1
        field = self._fields[_CALLS]
        return field["open"] + text + (field["close"] if closed else "")


def _is_plain(fields: Mapping[str, Any]) -> bool:
    """Whether content and reasoning are text and calls are JSON between two literal markers: all that can stream."""
    for name, field in fields.items():
        if name not in ("content", _CALLS, *_REASONING) or "transform" in field or field.get("optional") is False:
            return False
        if name == _CALLS:
            if field.get("content") != "json" or field.get("content_args"):
                return False
            if not isinstance(field.get("open"), str) or not isinstance(field.get("close"), str):
                return False
        elif field.get("content", "text") != "text":
            return False
    return True


def _reply(message: Mapping[str, Any]) -> Reply:
    reasoning = next((message[name] for name in _REASONING if message.get(name)), "")
    calls: list[ToolCall] = []
    for entry in message.get(_CALLS) or []:
        function = entry.get("function", entry)
        arguments = function.get("arguments", {})
        calls.append(ToolCall("", function["name"], arguments if isinstance(arguments, str) else compact(arguments)))
    return Reply(str(message.get("content") or "").strip(), str(reasoning).strip(), tuple(calls))
