"""OpenAI chat completions: pure functions, request -> conversation and turn -> response or SSE events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from stenograph.errors import ContextOverflow, EngineError, RequestError, StenographError
from stenograph.types import Conversation, Ids, Message, Reply, Role, Tool, ToolCall, Turn

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_MAX_INTEGER = 2**31 - 1  # what every engine's tensors hold


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a request asks. `asked` holds the sampling values that the agent gave, by Sampling's names."""

    conversation: Conversation
    asked: Mapping[str, Any]
    model: str
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    session: str | None = None  # a session id of ours in the body


# --- request -> records ------------------------------------------------------------------------------------------


def parse_request(body: bytes) -> ChatRequest:
    """Read a request body. Raises RequestError (400) that names the field."""
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as e:
        raise RequestError(f"the body is not JSON: {e}") from e
    fields = _Fields(_typed(raw, dict, "the body", "an object"), "")
    _refuse_unsupported(fields)
    # Tools stay out of the prompt of a request that forbids calls: nothing here can stop the model from making one.
    tools = () if fields.text("tool_choice") == "none" else tuple(_tools(fields))
    options = _Fields(fields.get("stream_options", dict, "an object") or {}, "stream_options.")
    session = fields.text("session_id")
    return ChatRequest(
        conversation=Conversation(tuple(_messages(fields)), tools),
        asked=_asked(fields),
        model=fields.text("model") or "",
        stream=fields.flag("stream"),
        include_usage=options.flag("include_usage"),
        logprobs=fields.flag("logprobs"),
        session=session if session and session.startswith("steno_") else None,
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to an object; errors name the field by its whole path."""

    values: Mapping[str, Any]
    path: str = field(default="")

    def get(self, name: str, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self.values.get(name)
        return None if value is None else _typed(value, kind, self.path + name, expected)

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        return value if isinstance(value, str) else None

    def flag(self, name: str) -> bool:
        return bool(self.get(name, bool, "true or false"))

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name, (int, float), "a number")
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise _invalid(self.path + name, f"must be between {low:g} and {high:g}, got {value}")
        return None if value is None else float(value)

    def integer(self, name: str, low: int) -> int | None:
        value = self.get(name, int, "an integer")
        if value is not None and not low <= value <= _MAX_INTEGER:
            raise _invalid(self.path + name, f"must be between {low} and {_MAX_INTEGER}, got {value}")
        return value


def _typed(value: Any, kind: type | tuple[type, ...], path: str, expected: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _invalid(path, f"must be {expected}, got {_shown(value)}")
    return value


def _invalid(path: str, what: str) -> RequestError:
    return RequestError(f"{path}: {what}", param=path)


def _shown(value: Any) -> str:
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # it reads a thousand levels and writes a quarter of that
        return "something nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_unsupported(fields: _Fields) -> None:
    if (fields.integer("n", 1) or 1) > 1:
        raise _invalid("n", "must be 1; send the request several times for several answers")
    if (fields.integer("top_logprobs", 0) or 0) > 0:
        raise _invalid("top_logprobs", "must be 0; the engine returns the sampled token's log-probability alone")
    if fields.values.get("tool_choice") not in (None, "auto", "none"):
        raise _invalid("tool_choice", 'must be "auto" or "none"; the engine cannot enforce a call')
    wanted = fields.get("response_format", dict, "an object")
    if wanted is not None and wanted.get("type", "text") != "text":
        raise _invalid("response_format", 'must be {"type": "text"}; the engine cannot constrain its output')


def _asked(fields: _Fields) -> dict[str, Any]:
    stop = fields.values.get("stop")
    stops = [stop] if isinstance(stop, str) else (stop or [])
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise _invalid("stop", f"must be a text or a list of texts, got {_shown(stop)}")
    asked = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 1e-9, 1),
        "top_k": max(fields.integer("top_k", -1) or 0, 0) if fields.values.get("top_k") is not None else None,
        "min_p": fields.number("min_p", 0, 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 1e-9, 100),
        "max_tokens": fields.integer("max_completion_tokens", 1) or fields.integer("max_tokens", 1),
        "seed": fields.get("seed", int, "an integer"),
        "stop": tuple(stops) or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _tools(fields: _Fields) -> list[Tool]:
    tools = []
    for i, raw in enumerate(fields.get("tools", list, "a list") or []):
        path = f"tools[{i}]"
        tool = _Fields(_typed(raw, dict, path, "an object"), path + ".")
        function = _Fields(tool.get("function", dict, "an object") or {}, f"{path}.function.")
        if raw.get("type", "function") != "function":
            raise _invalid(f"{path}.type", f'must be "function", got {_shown(raw["type"])}')
        name = function.get("name", str, "a text")
        if not name:
            raise _invalid(f"{path}.function.name", "is missing")
        description = function.get("description", str, "a text") or ""
        parameters = function.get("parameters", dict, "a JSON schema") or {}
        try:
            orjson.dumps(parameters)
        except orjson.JSONEncodeError as e:
            raise _invalid(f"{path}.function.parameters", "must be a JSON schema, this is nested too deeply") from e
        tools.append(Tool(name, description, parameters))
    return tools


_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",  # no chat template in use tells the two apart
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def _messages(fields: _Fields) -> list[Message]:
    raw_messages = fields.get("messages", list, "a list")
    if not raw_messages:
        raise _invalid("messages", "must hold at least one message")
    return [_message(raw, f"messages[{i}]") for i, raw in enumerate(raw_messages)]


def _message(raw: Any, path: str) -> Message:
    fields = _Fields(_typed(raw, dict, path, "an object"), path + ".")
    role = _ROLES.get(fields.values.get("role") or "") if isinstance(fields.values.get("role"), str) else None
    if role is None:
        raise _invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}, got {_shown(fields.values.get('role'))}")
    return Message(
        role=role,
        content=_text(fields.values.get("content"), f"{path}.content"),
        reasoning=fields.text("reasoning_content") or fields.text("reasoning") or "",
        tool_calls=tuple(_tool_calls(fields)),
        tool_call_id=fields.text("tool_call_id"),
        name=fields.text("name"),
    )


def _text(content: Any, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(_typed(content, list, path, "a text or a list of parts")):
        kind = _typed(part, dict, f"{path}[{i}]", "an object").get("type")
        text = part.get("text" if kind == "text" else "refusal")
        if kind not in ("text", "refusal"):
            raise _invalid(
                f"{path}[{i}].type", f'must be "text", got {_shown(kind)}; images and audio are not supported'
            )
        texts.append(_typed(text, str, f"{path}[{i}].{kind}", "a text"))
    return "".join(texts)


def _tool_calls(fields: _Fields) -> list[ToolCall]:
    calls = []
    for i, raw in enumerate(fields.get("tool_calls", list, "a list") or []):
        path = f"{fields.path}tool_calls[{i}]"
        call = _Fields(_typed(raw, dict, path, "an object"), path + ".")
        function = _Fields(call.get("function", dict, "an object") or {}, f"{path}.function.")
        name = function.get("name", str, "a text")
        if not name:
            raise _invalid(f"{path}.function.name", "is missing")
        calls.append(ToolCall(call.text("id") or "", name, function.get("arguments", str, "a JSON text") or ""))
    return calls


# --- records -> response -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Renders one turn for one request, whole or as SSE events."""

    id: str
    created: int
    request: ChatRequest
    decode: Callable[[Ids], str]

    def whole(self, turn: Turn, num_prompt: int) -> bytes:
        """The body of a non-streaming answer."""
        choice = {"index": 0, "message": _assistant(turn.reply), "finish_reason": _finish_reason(turn)}
        if self.request.logprobs:
            choice["logprobs"] = self._logprobs(turn)
        return orjson.dumps(
            {**self._head("chat.completion"), "choices": [choice], "usage": _usage(turn, num_prompt)},
        )

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, content: str = "", reasoning: str = "") -> bytes:
        delta = {"reasoning_content": reasoning} if reasoning else {}
        return self._chunk({**delta, "content": content} if content else delta)

    def end(self, turn: Turn, num_prompt: int) -> bytes:
        """Everything that a client may act on: the calls, the finish reason, the usage, the end."""
        calls = [{"index": i, **_call(call)} for i, call in enumerate(turn.reply.tool_calls)]
        events = [self._chunk({"tool_calls": [call]}) for call in calls]
        events.append(self._chunk({}, _finish_reason(turn), self._logprobs(turn) if self.request.logprobs else None))
        if self.request.include_usage:
            usage = {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(turn, num_prompt)}
            events.append(_event(usage))
        return b"".join([*events, DONE])

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return _event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    def _logprobs(self, turn: Turn) -> dict[str, Any]:
        tokens = [self.decode(turn.output_ids[i : i + 1]) for i in range(len(turn.output_ids))]
        return {
            "content": [
                {"token": token, "logprob": float(logprob), "bytes": _bytes(token), "top_logprobs": []}
                for token, logprob in zip(tokens, turn.rollout_logprobs, strict=True)
            ]
        }


def _bytes(token: str) -> list[int] | None:
    """The bytes of a token; None where it ends inside a character, so that its text does not tell them."""
    return None if "\ufffd" in token else list(token.encode())


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def _assistant(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.tool_calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [_call(call) for call in reply.tool_calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(turn: Turn) -> str:
    if turn.finish_reason == "length":
        return "length"
    return "tool_calls" if turn.reply.tool_calls else "stop"


def _usage(turn: Turn, num_prompt: int) -> dict[str, int]:
    num_output = len(turn.output_ids)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


# --- errors ------------------------------------------------------------------------------------------------------


def error(exception: Exception) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an error in this protocol's shape."""
    status, kind, code, told = _classify(exception)
    message = told.encode(errors="backslashreplace").decode()  # it may quote bytes that are no text
    headers = {"content-type": "application/json"}
    if isinstance(exception, EngineError) and exception.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(exception.retry_after_s))
    if isinstance(exception, RequestError) and not exception.retry:
        headers["x-should-retry"] = "false"
    param = exception.param if isinstance(exception, RequestError) else None
    detail = {"message": message, "type": kind, "param": param, "code": code}
    return status, headers, orjson.dumps({"error": detail})


def error_event(exception: Exception) -> bytes:
    """The same inside a stream that has begun."""
    return b"data: " + error(exception)[2] + b"\n\n"


def _classify(exception: Exception) -> tuple[int, str, str | None, str]:
    match exception:
        case ContextOverflow():
            told = f"This model's maximum context length is {exception.limit} tokens, but the prompt has "
            told += f"{exception.num_tokens}; shorten the conversation."
            return 400, "invalid_request_error", "context_length_exceeded", told
        case RequestError():
            kind = "authentication_error" if exception.status == 401 else "invalid_request_error"
            return exception.status, kind, exception.code, str(exception)
        case EngineError():
            passes = exception.status < 500 or exception.status == 503
            kind = "invalid_request_error" if exception.status < 500 else "engine_error"
            return exception.status if passes else 502, kind, None, str(exception)
        case StenographError():
            return 500, "server_error", None, str(exception)
        case _:
            return 500, "server_error", None, f"{type(exception).__name__}: {exception}"
