"""What a turn is for, and what says so: a request has the role that the first of these gives it.

What the client says that it is for; the shape of a title, a probe or a compaction; whose the client says that it is;
the turn that it continues; how a conversation that begins compares with the main one. What a request is for goes before
whose it is: what a sub-agent is asked to summarize is no more of its work than it would be of the main one's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import orjson

from stenograph.dialects.base import Request
from stenograph.traces.trace import TraceTree
from stenograph.types import BranchRole, Conversation, Message

_OPENING = 800  # characters of a system prompt or of a message that say what is asked
_ALIKE = 0.5  # share of word pairs in common; a prompt whose date or folder changed keeps far more
_PROBE_CHARS = 20

_TITLE = re.compile(
    r"\btitle generator\b|"
    r"\b(generat|writ|creat|suggest|extract|produc|com)\w*\b[^.!?]{0,60}\btitle\b"
    r"[^.!?]{0,80}\b(conversation|chat|thread|session|topic|message)",
    re.IGNORECASE,
)
_TALK = r"(conversation|chat|dialogue|transcript|history|session)"
_SUMMARY = re.compile(
    rf"\b(summar|compact|compress|condens|hand-?off)\w*\b[^.!?]{{0,100}}\b{_TALK}|"
    rf"\b({_TALK}|context)\W+(\w+\W+)?(compact|compress|summar|hand-?off)\w*",
    re.IGNORECASE,
)
# Of these there is one in all that _SUMMARY finds.
_SUMMARIES = ("summar", "compact", "compress", "condens", "handoff", "hand-off")
_GOES_ON = re.compile(r"\b(continu|resum)\w*|\bhand-?off\b|\bso far\b", re.IGNORECASE)
_FORBIDS_TOOLS = re.compile(r"\b(not|never|without|no)\b[^.!?]{0,40}\btools?\b", re.IGNORECASE)

_CLASSES: dict[str, BranchRole] = {
    "main": "main", "subagent": "sub-agent", "workflow": "sub-agent", "compaction": "compaction",
}  # fmt: skip
_KINDS: dict[str, BranchRole] = {"compaction": "compaction", "prewarm": "probe", "memory": "sub-agent"}


@dataclass(frozen=True, slots=True)
class Role:
    """What a turn is for; `evidence` is the one thing that decided it, as a short phrase."""

    name: BranchRole
    evidence: str


@dataclass(frozen=True, slots=True)
class _Look:
    """What tells one agent's conversations from another's."""

    system: str
    tools: frozenset[str]


class Roles:
    """The roles of one session's turns. It remembers what the main conversation of each session of the client is like.

    A title or a probe may come before the main conversation; neither becomes what the main one is like.
    """

    def __init__(self) -> None:
        self._mains: dict[str | None, _Look] = {}  # by the client's own session id, where it sends one
        self._begun: dict[str | None, _Look] = {}  # likewise, the first one with tools that no turn may be recorded of

    @classmethod
    def recorded(cls, tree: TraceTree) -> Roles:
        """As they were when the last of `tree`'s turns was recorded."""
        roles = cls()
        for name, turn in tree.turns.items():
            parent = tree.parent(name)
            may_begin = parent is None or tree.turn(parent).role == "compaction"
            if turn.role == "main" and (may_begin or turn.client_session not in roles._mains):
                before = None if parent is None else Role(tree.turn(parent).role, "")
                asked = Conversation(tree.said(name)[:-1], turn.tools)
                roles._remember(turn.client_session, asked, before)
        return roles

    def of(self, headers: Mapping[str, str], request: Request, parent: Role | None) -> Role:
        """The role of a turn that `request` asks for; `parent` is that of the recorded turn that it continues.

        `headers` are found whatever their case.
        """
        said = _said(headers, request.hints)
        session = _session(said)
        look = _look(request.conversation)
        main = self._main(session, look)
        begins = parent is None or _goes_on_after_compaction(request.conversation, parent)
        role = (
            _purpose(said, request, look)
            or (_title(request, look) or _probe(request) or _summarizer(look, main) if begins else None)
            or _compaction(request.conversation, main)
            or _owner(said)
            or (Role(parent.name, f"continues a {parent.name} turn") if parent is not None and not begins else None)
            or _compared(look, main)
        )
        if role.name == "main" and look.tools:
            self._begun.setdefault(session, look)
        return role

    def again(self, headers: Mapping[str, str], request: Request, role: Role) -> Role:
        """The role of a conversation that begins, `role` until now, at the end of its first turn.

        Meanwhile an agent at work may have begun, and what has no tools was asked on its side. Of others that begin at
        the same time it does not matter which is the first to end.
        """
        look = _look(request.conversation)
        main = self._main(client_session(headers, request), look)
        return self.of(headers, request, None) if not look.tools and main is not None and main.tools else role

    def remember(self, headers: Mapping[str, str], request: Request, role: Role, parent: Role | None) -> None:
        """Take note of a turn that was recorded with `role`; what failed says nothing of what the main one is like."""
        if role.name == "main":
            self._remember(client_session(headers, request), request.conversation, parent)

    def _remember(self, session: str | None, asked: Conversation, parent: Role | None) -> None:
        if parent is None or _goes_on_after_compaction(asked, parent) or session not in self._mains:
            self._mains[session] = _look(asked)

    def _main(self, session: str | None, look: _Look) -> _Look | None:
        """What the main conversation is like. The first turn of an agent at work takes its time, and may fail.

        Meanwhile its request says already that those without tools are asked on the side.
        """
        main = self._mains.get(session)
        return main if look.tools or (main is not None and main.tools) else self._begun.get(session, main)


# --- what the client says ----------------------------------------------------------------------------------------


def _said(headers: Mapping[str, str], hints: Mapping[str, str]) -> dict[str, str]:
    """What the client says of a request, by header name; its body repeats some of it, and proxies drop headers."""
    said = {name.removeprefix("client_metadata."): value for name, value in hints.items()} | dict(headers)
    return {name.lower().replace("_", "-"): _text(value) for name, value in said.items() if value.strip()}


def _text(value: str) -> str:
    """A header's value, with what in it is no text replaced: it is recorded."""
    return value.strip().encode(errors="surrogateescape").decode(errors="replace")


def client_session(headers: Mapping[str, str], request: Request) -> str | None:
    """The id of the client's own session, which its sub-agents share or name as their parent's."""
    return _session(_said(headers, request.hints))


def _session(said: Mapping[str, str]) -> str | None:
    for name in ("x-claude-code-session-id", "session-id", "x-session-id"):
        if name in said:
            return said[name]
    user = said.get("user-id")
    if user is not None:  # Claude Code writes an object there
        return str(_object(user).get("session_id") or user)
    return said.get("prompt-cache-key")


def _purpose(said: Mapping[str, str], request: Request, look: _Look) -> Role | None:
    """What the client says that a request is for."""
    if trigger := said.get("x-claude-code-compaction"):
        return _told("compaction", "x-claude-code-compaction", trigger)
    kind = said.get("x-claude-code-request-class", "")
    if kind == "auxiliary":  # titles, and checks of all sorts
        return _told("title" if _title(request, look) else "probe", "x-claude-code-request-class", kind)
    if kind in _CLASSES:
        return _told(_CLASSES[kind], "x-claude-code-request-class", kind)
    if said.get("x-openai-subagent") == "compact":
        return _told("compaction", "x-openai-subagent", "compact")
    kind = str(_object(said.get("x-codex-turn-metadata")).get("request_kind"))
    if kind in _KINDS:
        return _told(_KINDS[kind], "x-codex-turn-metadata's request_kind", kind)
    if kind == "turn":  # of an agent's work, so all that is open is whose
        return _owner(said)
    return None


def _owner(said: Mapping[str, str]) -> Role | None:
    """Whose request the client says it is."""
    for name in ("x-openai-subagent", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"):
        if name in said:
            return _told("sub-agent", name, said[name])
    turn = _object(said.get("x-codex-turn-metadata"))
    session = said.get("session-id") or said.get("x-session-id")
    thread = said.get("thread-id") or said.get("x-codex-window-id", "").rpartition(":")[0]
    for name, own in (("x-codex-parent-thread-id", thread), ("x-parent-session-id", session)):
        if said.get(name, own) != own:
            return _told("sub-agent", name, said[name])
    if turn.get("thread_source") == "subagent":
        return _told("sub-agent", "x-codex-turn-metadata's thread_source", "subagent")
    if not thread or not session:
        return None
    if thread != session and turn.get("thread_source") != "user":
        return _told("sub-agent", "thread-id other than session-id", thread)
    if thread == session and turn.get("request_kind") == "turn":
        return _told("main", "thread-id equal to session-id", thread)
    return None


def _told(name: BranchRole, where: str, value: str) -> Role:
    return Role(name, f"{where}: {value[:60]}")


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


# --- what its request is like ------------------------------------------------------------------------------------


def _look(conversation: Conversation) -> _Look:
    """Instructions that follow the user's first message are of the moment, and left out."""
    system = takewhile(_instructs, conversation.messages)
    return _Look("\n".join(message.content for message in system), frozenset(tool.name for tool in conversation.tools))


def _instructs(message: Message) -> bool:
    return message.role in ("system", "developer")


def _title(request: Request, look: _Look) -> Role | None:
    user = next((message.content for message in request.conversation.messages if message.role == "user"), "")
    is_asked = any(_TITLE.search(text[:_OPENING]) for text in (look.system, user))
    if not look.tools and _has_title(request.grammar or {}):
        return Role("title", "no tools and a schema with a title")
    if not look.tools and is_asked:
        return Role("title", "no tools and a title asked for")
    tools = request.conversation.tools
    # Qwen Code has its answers in a schema as a function's arguments.
    if is_asked and len(tools) == 1 and _has_title(tools[0].parameters):
        return Role("title", "a title asked for, and no tool but one that takes it")
    return None


def _has_title(schema: Mapping[str, Any]) -> bool:
    """Whether what follows `schema` is a title, and flags: what has more fields asks for more than a title."""
    fields = schema.get("properties")
    if not isinstance(fields, dict):
        return False
    others = [field for name, field in fields.items() if "title" not in name.lower()]
    return len(others) < len(fields) and all(isinstance(one, dict) and one.get("type") == "boolean" for one in others)


def _probe(request: Request) -> Role | None:
    said = [message for message in request.conversation.messages if not _instructs(message)]
    if len(said) != 1:
        return None
    text = said[0].content.strip()
    if request.asked.get("max_tokens") == 1 and len(text) <= _PROBE_CHARS and not request.conversation.tools:
        return Role("probe", "one token asked of one short message")
    if text.rpartition("\n")[2].lower() == "warmup":
        return Role("probe", "a warm-up message")
    return None


def _summarizer(look: _Look, main: _Look | None) -> Role | None:
    """Some clients have another agent make their summaries, in a conversation of its own."""
    if main is None or not _asks_for_summary(look.system[:_OPENING]) or _likeness(look.system, main.system) >= _ALIKE:
        return None
    return Role("compaction", "a system prompt for summaries of conversations")


def _asks_for_summary(text: str) -> bool:
    """Most texts have none of these words; to look for them first costs a tenth of looking for what they stand in."""
    lower = text.lower()
    return any(word in lower for word in _SUMMARIES) and _SUMMARY.search(text) is not None


def _compaction(conversation: Conversation, main: _Look | None) -> Role | None:
    """Others ask the agent itself, at the end of what it did.

    So may its users; but only a client tells it to call no tools meanwhile, or takes them away.
    """
    asked = _asked_last(conversation)
    replied = any(message.role == "assistant" for message in conversation.messages)
    if not replied or not _asks_for_summary(asked[: 2 * _OPENING]):
        return None
    if conversation.tools:
        aside, how = _FORBIDS_TOOLS.search(asked) is not None, "and no tools allowed"
    else:
        aside, how = (main is not None and bool(main.tools)) or _GOES_ON.search(asked) is not None, "without tools"
    return Role("compaction", f"a summary of the conversation asked for, {how}") if aside else None


def _asked_last(conversation: Conversation) -> str:
    """The text of the user's message that is to be answered, if it is one."""
    last = next((message for message in reversed(conversation.messages) if not _instructs(message)), None)
    return last.content if last is not None and last.role == "user" else ""


def _goes_on_after_compaction(conversation: Conversation, parent: Role) -> bool:
    """A user who asked for a summary in passing goes on with the agent, and its tools."""
    return parent.name == "compaction" and bool(conversation.tools) and bool(_asked_last(conversation))


def _compared(look: _Look, main: _Look | None) -> Role:
    """The role of a conversation that begins: the main one is rewound and begun anew, other agents differ from it."""
    if main is None:
        return Role("main", "the first conversation")
    if look.tools and not main.tools:  # what came first was asked on the side: an agent at work has tools
        return Role("main", "the first conversation with tools")
    if look.system == main.system:
        if main.tools and not look.tools & main.tools:
            return Role("sub-agent", "none of the main conversation's tools")
        return Role("main", "the main conversation's system prompt")
    if look.tools >= main.tools and _likeness(look.system, main.system) >= _ALIKE:
        return Role("main", "the main conversation's tools, and nearly its system prompt")
    other = "" if look.tools == main.tools else " and other tools" if look.tools else " and no tools"
    return Role("sub-agent", f"another system prompt{other} than the main conversation's")


def _likeness(a: str, b: str) -> float:
    """The share of word pairs that two texts have in common, from 0 to 1."""
    pairs = [set(pairwise(words)) for words in (a.split(), b.split())]
    return len(pairs[0] & pairs[1]) / max(1, *map(len, pairs))
