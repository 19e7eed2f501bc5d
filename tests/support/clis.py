"""Agent CLIs by what they send: Claude Code in Messages, opencode in chat completions, Codex in Responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.answers import CHAT, MESSAGES, RESPONSES, Said, read, said
from support.listening import Session

SESSION = "6f1c"  # the client's own
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Cli:
    """One client. `head` is what a request says beside its messages, `headers` whose conversation it is of."""

    path: str
    head: Callable[[str, Sequence[str]], dict[str, Any]]
    messages: str  # the field that they are in
    user: Callable[[str], dict[str, Any]]
    echo: Callable[[Any], list[dict[str, Any]]]  # an answer as the next request has it
    results: Callable[[Mapping[str, str]], list[dict[str, Any]]]  # by the ids of the calls
    headers: Callable[[str], dict[str, str]]
    limit: str  # the field of the token limit
    effort: Callable[[str], dict[str, Any]]
    accepted: tuple[str, ...]  # what it changes of a call that it sends back


@dataclass(slots=True)
class Thread:
    """One conversation of a client: an agent's, a sub-agent's, or one that is asked on the side."""

    session: Session
    cli: Cli
    system: str
    tools: Sequence[str] = ("bash",)
    name: str = SESSION  # another than the session's is of a sub-agent
    headers: dict[str, str] = field(default_factory=dict)  # beside the client's own
    said: list[dict[str, Any]] = field(default_factory=list)
    last: Said | None = None

    def body(self, **fields: Any) -> bytes:
        """The request for the next turn; a field that is None is left out."""
        system = [{"role": "system", "content": self.system}] if self.cli.path == CHAT else []
        whole = {**self.cli.head(self.system, self.tools), self.cli.messages: [*system, *self.said], **fields}
        return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()

    async def send(self, body: bytes) -> Any:
        """The content of the answer, as the protocol has it."""
        headers = {"authorization": f"Bearer {self.session.api_key}", **self.cli.headers(self.name), **self.headers}
        path = f"/s/{self.session.id}{self.cli.path}"
        status, _, answer = await self.session.client.send("POST", path, body, headers)
        assert status == 200, answer
        return read(self.cli.path, answer, json.loads(body).get("stream", False))[0]

    async def answer(self, **fields: Any) -> Said:
        """Ask for the next turn, and go on from what comes."""
        return self.adopt(await self.send(self.body(**fields)))

    def adopt(self, content: Any) -> Said:
        self.said += self.cli.echo(content)
        self.last = said(self.cli.path, content)
        return self.last

    async def ask(self, text: str, **fields: Any) -> Said:
        self.said.append(self.cli.user(text))
        return await self.answer(**fields)

    async def give(self, text: str, **fields: Any) -> Said:
        """Every call of the last answer has the result `text`."""
        assert self.last is not None
        ids = [id for kind, id in self.last.ids if kind == ("call_id" if self.cli.path == RESPONSES else "call")]
        self.said += self.cli.results(dict.fromkeys(ids, text))
        return await self.answer(**fields)


def respelled(arguments: str) -> str:
    """As JavaScript writes them; what does not parse stays."""
    try:
        return json.dumps(json.loads(arguments), separators=(",", ":"))
    except ValueError:
        return arguments


# --- opencode ----------------------------------------------------------------------------------------------------


def _chat_head(system: str, tools: Sequence[str]) -> dict[str, Any]:
    functions = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in tools]
    offered = {"tools": functions, "tool_choice": "auto"} if functions else {}
    return {"model": "m", "max_tokens": 32_000, "stream": True, "stream_options": {"include_usage": True}, **offered}


def _chat_echo(message: dict[str, Any]) -> list[dict[str, Any]]:
    echoed: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("reasoning_content"):
        echoed["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        echoed["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": _chat_function(**call["function"])}
            for call in message["tool_calls"]
        ]
    return [echoed]


def _chat_function(name: str, arguments: str) -> dict[str, str]:
    return {"name": name, "arguments": respelled(arguments)}


def _chat_headers(thread: str) -> dict[str, str]:
    parent = {} if thread == SESSION else {"x-parent-session-id": SESSION}
    return {"x-session-affinity": thread, "x-session-id": thread, **parent}


OPENCODE = Cli(
    path=CHAT,
    head=_chat_head,
    messages="messages",
    user=lambda text: {"role": "user", "content": text},
    echo=_chat_echo,
    results=lambda texts: [{"role": "tool", "tool_call_id": id, "content": text} for id, text in texts.items()],
    headers=_chat_headers,
    limit="max_tokens",
    effort=lambda effort: {"reasoning_effort": effort},
    accepted=("arguments_respelled",),
)


# --- Claude Code -------------------------------------------------------------------------------------------------


def _messages_head(system: str, tools: Sequence[str]) -> dict[str, Any]:
    """The first two blocks of the system text are every request's, whoever asks."""
    blocks = ["x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli;", "You are a coding CLI's agent.", system]
    cached = {"cache_control": {"type": "ephemeral"}}
    user_id = json.dumps({"device_id": "0", "account_uuid": "", "session_id": SESSION})
    return {
        "model": "m",
        "system": [{"type": "text", "text": text, **(cached if n else {})} for n, text in enumerate(blocks)],
        "tools": [{"name": name, "description": "", "input_schema": SCHEMA} for name in tools],
        "metadata": {"user_id": user_id},
        "max_tokens": 128_000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }


def _messages_echo(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    private = "_streamed_input_json"
    return [{"role": "assistant", "content": [{k: v for k, v in one.items() if k != private} for one in blocks]}]


def _messages_results(texts: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [
                {"tool_use_id": id, "type": "tool_result", "content": text, "is_error": False}
                for id, text in texts.items()
            ],
        }
    ]


CLAUDE_CODE = Cli(
    path=MESSAGES,
    head=_messages_head,
    messages="messages",
    user=lambda text: {"role": "user", "content": [{"type": "text", "text": text}]},
    echo=_messages_echo,
    results=_messages_results,
    headers=lambda thread: {"X-Claude-Code-Session-Id": SESSION, "anthropic-version": "2023-06-01"},
    limit="max_tokens",
    effort=lambda effort: {"output_config": {"effort": effort}},
    accepted=("arguments_respelled",),
)


# --- Codex -------------------------------------------------------------------------------------------------------


def _responses_head(system: str, tools: Sequence[str]) -> dict[str, Any]:
    return {
        "model": "m",
        "instructions": system,
        "tools": [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in tools],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": SESSION,
        "store": False,
        "stream": True,
    }


def codex_turn(thread: str, kind: str = "turn") -> dict[str, str]:
    """What is said of a request of the conversation `thread`."""
    source = "user" if thread == SESSION else "subagent"
    about = {"session_id": SESSION, "thread_id": thread, "request_kind": kind, "thread_source": source}
    return {"x-codex-turn-metadata": json.dumps(about)}


CODEX = Cli(
    path=RESPONSES,
    head=_responses_head,
    messages="input",
    user=lambda text: {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]},
    echo=list,
    results=lambda texts: [
        {"type": "function_call_output", "call_id": id, "output": text} for id, text in texts.items()
    ],
    headers=lambda thread: {"session-id": SESSION, "thread-id": thread, **codex_turn(thread)},
    limit="max_output_tokens",
    effort=lambda effort: {"reasoning": {"effort": effort, "summary": "auto"}},
    accepted=(),
)

CLIS = {"Claude Code": CLAUDE_CODE, "opencode": OPENCODE, "Codex": CODEX}
