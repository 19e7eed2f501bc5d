"""OpenAI chat completions: pure functions, request -> conversation and turn -> response or SSE events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from msgspec import Raw

from stenograph.dialects.base import Answered, Decode, Failure, HttpError, Request, Writer, failure, own_session
from stenograph.dialects.fields import Fields, Joined, invalid, shown, typed
from stenograph.dialects.hints import read_hints
from stenograph.dialects.sampling import ignored, read_sampling, refuse_constraints
from stenograph.dialects.seen import Seen, read_again
from stenograph.types import Conversation, Message, Reply, Role, Tool, ToolCall, Turn

_DONE = b"data: [DONE]\n\n"
_MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class ChatRequest(Request):
    """What this protocol asks beyond the others."""

    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False

    def writer(self, name: str, created: int, decode: Decode) -> Writer:
        return ChatWriter(self, f"chatcmpl-{name}", created, decode)


# --- request -> records ------------------------------------------------------------------------------------------


class _Body(msgspec.Struct):
    """The parts of a body that come again."""

    messages: list[Raw] = []
    tools: Raw = Raw()


def parse_request(body: bytes, seen: Seen | None = None) -> ChatRequest:
    """Read a request body. Raises RequestError (400) that names the field."""
    fields = read_again(body, seen, _Body)
    refuse_top_logprobs(fields)
    num_choices = fields.integer("n", 1) or 1
    if num_choices > _MAX_CHOICES:
        raise invalid("n", f"must be at most {_MAX_CHOICES}, got {num_choices}")
    _refuse(fields)
    messages = _messages(fields)
    return ChatRequest(
        conversation=Conversation(messages, _tools(fields), continues_last(fields, messages)),
        asked=read_sampling(fields, stop="stop", max_tokens=("max_completion_tokens", "max_tokens")),
        model=fields.text("model") or "",
        stream=fields.flag("stream"),
        num_choices=num_choices,
        grammar=read_format(fields.object("response_format"), "json_schema"),
        session=own_session(fields.values.get("session_id")),
        notes=_ignored(fields),
        hints=read_hints(fields),
        include_usage=fields.object("stream_options").flag("include_usage"),
        logprobs=fields.flag("logprobs"),
        token_ids=fields.flag("return_token_ids"),
    )


def read_format(wanted: Fields, schema_in: str | None = None) -> Mapping[str, Any] | None:
    """The JSON schema that the answer must follow; `schema_in` names the object within that holds it."""
    match wanted.values.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            return (wanted if schema_in is None else wanted.object(schema_in)).required_schema("schema")
        case kind:
            told = f'must be "text", "json_object" or "json_schema", got {shown(kind)}'
            raise invalid(f"{wanted.path}type", told)


def continues_last(fields: Fields, messages: Sequence[Message]) -> bool:
    """Whether the last message is to be gone on with."""
    continues = fields.flag("continue_final_message")
    if continues and messages and messages[-1].role != "assistant":
        raise invalid("continue_final_message", f"needs an assistant's last message, got a {messages[-1].role}'s")
    return continues


def refuse_top_logprobs(fields: Fields) -> None:
    if (fields.integer("top_logprobs", 0) or 0) > 0:
        raise invalid("top_logprobs", "must be 0; the engine returns the sampled token's log-probability alone")


def ignored_parallel(fields: Fields) -> list[str]:
    return ["ignored:parallel_tool_calls"] if fields.values.get("parallel_tool_calls") is False else []


def _refuse(fields: Fields) -> None:
    """What would change the answer and is not done here."""
    if fields.values.get("functions"):
        raise invalid("functions", "are not read here; give them as tools")
    if "audio" in fields.texts("modalities"):
        raise invalid("modalities", "must be text alone; audio is not supported")
    refuse_constraints(fields, "response_format")


def _ignored(fields: Fields) -> tuple[str, ...]:
    """What was asked and cannot be done, though nothing breaks by it."""
    notes = ignored_parallel(fields) + ignored(fields, "reasoning_effort", "reasoning.effort", "verbosity")
    match fields.values.get("thinking"):
        case {"type": "disabled"}:  # as some clients ask it; how much a model thinks is its own
            notes.append("ignored:thinking")
    notes += ["left_out:web_search"] if fields.values.get("web_search_options") is not None else []
    return tuple(notes)


def allowed_tools(fields: Fields) -> list[Fields] | None:
    """The tools that `tool_choice` lets the model call, as it names them; None where it may call any.

    The others stay out of the prompt: nothing here can stop a model that sees a tool from calling it.
    """
    choice = fields.values.get("tool_choice")
    if choice in (None, "auto"):
        return None
    if choice == "none":
        return []
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = fields.object("tool_choice")
        allowed = allowed.object("allowed_tools") if "allowed_tools" in allowed.values else allowed
        if allowed.values.get("mode") == "auto":
            return allowed.objects("tools")
    told = 'must be "auto", "none", or allowed tools with the mode "auto"; the engine cannot enforce a call'
    raise invalid("tool_choice", told)


def _tools(fields: Fields) -> tuple[Tool, ...]:
    allowed = allowed_tools(fields)
    if allowed is None:
        return fields.whole("tools", _all_tools)
    names = {tool.object("function").text("name") for tool in allowed}
    return tuple(tool for tool in fields.whole("tools", _all_tools) if tool.name in names) if names else ()


def _all_tools(fields: Fields) -> tuple[Tool, ...]:
    tools = []
    for tool in fields.objects("tools"):
        if tool.values.get("type", "function") != "function":
            raise invalid(f"{tool.path}type", f'must be "function", got {shown(tool.values["type"])}')
        function = tool.object("function")
        name = function.name("name")
        description = function.get("description", str, "a text") or ""
        tools.append(Tool(name, description, function.schema("parameters") or {}))
    return tuple(tools)


ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",  # no chat template in use tells the two apart
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def _messages(fields: Fields) -> tuple[Message, ...]:
    messages = fields.each("messages", _message)
    if not messages:
        raise invalid("messages", "must hold at least one message")
    return messages


def _message(fields: Fields) -> Message:
    role = ROLES.get(fields.text("role") or "")
    if role is None:
        told = f"must be one of {', '.join(ROLES)}, got {shown(fields.values.get('role'))}"
        raise invalid(f"{fields.path}role", told)
    if fields.values.get("function_call") is not None:
        raise invalid(f"{fields.path}function_call", "is not read here; give the call among tool_calls")
    content = _text(fields)
    return Message(
        role=role,
        content=content.text or fields.text("refusal") or "",
        reasoning=fields.text("reasoning_content") or fields.text("reasoning") or "",
        tool_calls=tuple(_tool_calls(fields)),
        tool_call_id=fields.text("tool_call_id"),
        name=fields.text("name"),
        joints=content.joints,
    )


def _text(fields: Fields) -> Joined:
    return Joined.of(read_texts(fields.values.get("content"), f"{fields.path}content", _PARTS, _REFUSED))


_PARTS = {"text": "text", "refusal": "refusal"}
_REFUSED = 'must be "text", got {}; images and audio are not supported'


def read_texts(content: Any, path: str, parts: Mapping[str, str], refused: str) -> list[str]:
    """A text, or the parts of one: `parts` says by type where theirs stands, `refused` what others are told."""
    if content is None or isinstance(content, str):
        return [content or ""]
    texts = []
    for i, part in enumerate(typed(content, list, path, "a text or a list of parts")):
        kind = typed(part, dict, f"{path}[{i}]", "an object").get("type")
        key = parts.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise invalid(f"{path}[{i}].type", refused.format(shown(kind)))
        texts.append(typed(part.get(key), str, f"{path}[{i}].{key}", "a text"))
    return texts


def _tool_calls(fields: Fields) -> list[ToolCall]:
    calls = []
    for call in fields.objects("tool_calls"):
        function = call.object("function")
        arguments = function.get("arguments", str, "a JSON text") or ""
        calls.append(ToolCall(call.text("id") or "", function.name("name"), arguments))
    return calls


# --- records -> response -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Writes the choices of one answer."""

    request: ChatRequest
    id: str
    created: int
    decode: Decode

    def whole(self, answered: Sequence[Answered]) -> bytes:
        choices = []
        for i, one in enumerate(answered):
            choice = {"index": i, "message": _assistant(one.shown), "finish_reason": _finish_reason(one.turn)}
            choices.append(choice | self._extras(one.turn))
        body = {**self._head("chat.completion"), "choices": choices, "usage": _usage(answered)}
        if self.request.token_ids:
            body["prompt_token_ids"] = answered[0].prompt_ids
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    def begin(self, num_prompt: int) -> bytes:
        begun = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(i, begun) for i in range(self.request.num_choices))

    def delta(self, choice: int, content: str, reasoning: str) -> bytes:
        delta = {"reasoning_content": reasoning} if reasoning else {}
        return self._chunk(choice, {**delta, "content": content} if content else delta)

    def end(self, answered: Sequence[Answered]) -> bytes:
        events = []
        for i, one in enumerate(answered):
            calls = [{"index": n, **_call(call)} for n, call in enumerate(one.shown.tool_calls)]
            events += [self._chunk(i, {"tool_calls": [call]}) for call in calls]
            events.append(self._chunk(i, {}, _finish_reason(one.turn), self._extras(one.turn)))
        if self.request.include_usage:
            usage = {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(answered)}
            events.append(_event(usage))
        return b"".join([*events, _DONE])

    def failed(self, exception: Exception) -> bytes:
        return b"data: " + error(exception).body + b"\n\n"

    def _chunk(
        self, choice: int, delta: dict[str, Any], finish_reason: str | None = None, extras: Mapping[str, Any] = {}
    ) -> bytes:
        body = {"index": choice, "delta": delta, "finish_reason": finish_reason, **extras}
        return _event({**self._head("chat.completion.chunk"), "choices": [body]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    def _extras(self, turn: Turn) -> dict[str, Any]:
        """What of the record was asked for."""
        extras: dict[str, Any] = {}
        if self.request.logprobs:
            extras["logprobs"] = {"content": logprob_rows(turn, self.decode)}
        if self.request.token_ids:
            extras["token_ids"] = turn.output_ids
        return extras


def logprob_rows(turn: Turn, decode: Decode) -> list[dict[str, Any]]:
    """A turn's tokens with their log-probabilities, as OpenAI's protocols show them."""
    tokens = [decode(turn.output_ids[i : i + 1]) for i in range(len(turn.output_ids))]
    return [
        {"token": token, "logprob": float(logprob), "bytes": _bytes(token), "top_logprobs": []}
        for token, logprob in zip(tokens, turn.rollout_logprobs, strict=True)
    ]


def _bytes(token: str) -> list[int] | None:
    """The bytes of a token; None where it ends inside a character, so that its text does not tell them."""
    return None if "\ufffd" in token else list(token.encode())


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


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


def _usage(answered: Sequence[Answered]) -> dict[str, Any]:
    num_prompt, num_output = answered[0].num_prompt, sum(len(one.turn.output_ids) for one in answered)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
    return {**usage, "completion_tokens_details": {"reasoning_tokens": sum(one.num_reasoning for one in answered)}}


# --- errors ------------------------------------------------------------------------------------------------------


def error(exception: Exception) -> HttpError:
    return openai_error(failure(exception))


def openai_error(told: Failure) -> HttpError:
    """The error object that OpenAI's protocols share."""
    message = told.message
    if told.overflow is not None:
        num_tokens, limit = told.overflow
        message = f"This model's maximum context length is {limit} tokens, but the prompt has {num_tokens}; "
        message += "shorten the conversation."
    kind = _ERROR_TYPES.get(told.kind, "invalid_request_error")
    detail = {"message": message, "type": kind, "param": told.param, "code": told.code}
    headers = {"content-type": "application/json", **told.headers}
    return HttpError(told.status, headers, orjson.dumps({"error": detail}))


_ERROR_TYPES = {
    "authentication": "authentication_error",
    "rate_limit": "rate_limit_error",
    "overloaded": "engine_error",
    "engine": "engine_error",
    "internal": "server_error",
}
