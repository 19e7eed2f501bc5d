"""What a turn is for is decided by the client's word, then by the shape of its request, and the evidence is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from multidict import CIMultiDict

from stenograph.dialects import chat, messages, responses
from stenograph.dialects.base import Request
from stenograph.gateway.roles import Role, Roles, client_session
from stenograph.types import BranchRole, Tool
from support.listening import new_call

Said = tuple[str, str]  # role, text

AGENT = "You are a coding agent. Work in the folder that you are given. Change files with care, and run the tests."
TOOLS = ("bash", "edit", "task")
TASK = ("user", "Fix the bug in parse.py")
DONE = ("assistant", "It is fixed.")
MAIN = Role("main", "the first conversation")
TITLE_SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
SUMMARY = "Write a summary of our conversation, with which another model can continue the work."
NO_TOOLS = "Do not call any of the tools; answer in text."


def taken(roles: Roles, headers: Mapping[str, str], request: Request, parent: Role | None) -> Role:
    """The role of a turn that is taken and recorded."""
    role = roles.of(headers, request, parent)
    roles.remember(headers, request, role, parent)
    return role


def asked(
    *said: Said,
    system: str | None = AGENT,
    tools: Sequence[str] = TOOLS,
    hints: Mapping[str, str] | None = None,
    **fields: Any,
) -> Request:
    lines = [("system", system), *said] if system is not None else said
    body = {
        "messages": [{"role": role, "content": text} for role, text in lines],
        "tools": [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools],
        **fields,
    }
    return replace(chat.parse_request(json.dumps(body).encode()), hints=hints or {})


def schema(**properties: object) -> dict[str, object]:
    wanted = {"type": "object", "properties": properties}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted}}


def role_of(
    request: Request, headers: Mapping[str, str] | None = None, parent: Role | None = None, known: Request | None = None
) -> Role:
    """The role of a request that comes after the main conversation has begun."""
    roles = Roles()
    assert taken(roles, {}, known or asked(TASK), None).name == "main"
    return taken(roles, CIMultiDict(headers or {}), request, parent)


def turn(**values: object) -> dict[str, str]:
    return {"x-codex-turn-metadata": json.dumps(values)}


# --- what the client says ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "role", "evidence"),
    [
        ({"X-Claude-Code-Request-Class": "main"}, "main", "x-claude-code-request-class: main"),
        ({"X-Claude-Code-Request-Class": "subagent"}, "sub-agent", "x-claude-code-request-class: subagent"),
        ({"X-Claude-Code-Request-Class": "workflow"}, "sub-agent", "x-claude-code-request-class: workflow"),
        ({"X-Claude-Code-Request-Class": "compaction"}, "compaction", "x-claude-code-request-class: compaction"),
        ({"X-Claude-Code-Request-Class": "auxiliary"}, "probe", "x-claude-code-request-class: auxiliary"),
        ({"X-Claude-Code-Compaction": "auto"}, "compaction", "x-claude-code-compaction: auto"),
        ({"x-claude-code-agent-id": "a1"}, "sub-agent", "x-claude-code-agent-id: a1"),
        (
            {"x-claude-code-agent-id": "a1", "x-claude-code-request-class": "compaction"},
            "compaction",
            "x-claude-code-request-class: compaction",
        ),
        ({"X-OpenAI-Subagent": "review"}, "sub-agent", "x-openai-subagent: review"),
        ({"x-openai-subagent": "collab_spawn"}, "sub-agent", "x-openai-subagent: collab_spawn"),
        ({"x-openai-subagent": "memory_consolidation"}, "sub-agent", "x-openai-subagent: memory_consolidation"),
        ({"x-openai-subagent": "compact"}, "compaction", "x-openai-subagent: compact"),
        (turn(request_kind="compaction"), "compaction", "x-codex-turn-metadata's request_kind: compaction"),
        (turn(request_kind="prewarm"), "probe", "x-codex-turn-metadata's request_kind: prewarm"),
        (turn(request_kind="memory"), "sub-agent", "x-codex-turn-metadata's request_kind: memory"),
        (turn(thread_source="subagent"), "sub-agent", "x-codex-turn-metadata's thread_source: subagent"),
        ({"thread-id": "t2", "x-codex-parent-thread-id": "t1"}, "sub-agent", "x-codex-parent-thread-id: t1"),
        ({"session-id": "t1", "thread-id": "t2"}, "sub-agent", "thread-id other than session-id: t2"),
        ({"session-id": "t1", "x-codex-window-id": "t2:0"}, "sub-agent", "thread-id other than session-id: t2"),
        (
            {"session-id": "t1", "thread-id": "t1", **turn(request_kind="turn")},
            "main",
            "thread-id equal to session-id: t1",
        ),
        ({"x-session-id": "s2", "x-parent-session-id": "s1"}, "sub-agent", "x-parent-session-id: s1"),
        ({"x-session-id": "s1", "x-parent-session-id": "s1"}, "main", "the first conversation"),
        ({"x-claude-code-agent-id": " "}, "main", "the main conversation's system prompt"),
        ({"x-codex-turn-metadata": "no JSON"}, "main", "the main conversation's system prompt"),
        ({"x-codex-turn-metadata": "[]"}, "main", "the main conversation's system prompt"),
    ],
)
def test_the_clients_word_decides(headers: dict[str, str], role: BranchRole, evidence: str) -> None:
    assert role_of(asked(TASK), headers) == Role(role, evidence)


def test_the_clients_word_goes_before_the_turn_that_is_continued() -> None:
    request = asked(TASK, DONE, ("user", "go on"))
    assert role_of(request, {"x-claude-code-agent-id": "a1"}, MAIN).name == "sub-agent"
    assert role_of(request, turn(request_kind="compaction"), MAIN).name == "compaction"


def test_the_body_stands_in_for_headers_that_did_not_arrive_and_headers_go_first() -> None:
    hints = {"client_metadata.x-openai-subagent": "review"}
    assert role_of(asked(TASK, hints=hints)) == Role("sub-agent", "x-openai-subagent: review")
    hints = {"client_metadata.session_id": "t1", "client_metadata.thread_id": "t2"}
    assert role_of(asked(TASK, hints=hints)) == Role("sub-agent", "thread-id other than session-id: t2")
    assert role_of(asked(TASK, hints=hints), {"thread-id": "t1"}).name == "main"


def test_a_thread_that_a_user_began_is_no_sub_agents_though_its_session_is_older() -> None:
    headers = {"session-id": "t1", "thread-id": "t2", **turn(thread_source="user", request_kind="turn")}
    assert role_of(asked(TASK), headers).name == "main"


def test_a_request_said_to_be_an_agents_turn_is_none_of_what_it_looks_like() -> None:
    headers = {"session-id": "t1", "thread-id": "t1", **turn(request_kind="turn")}
    assert role_of(asked(TASK, DONE, ("user", f"{SUMMARY} {NO_TOOLS}")), headers, MAIN).name == "main"


def test_an_auxiliary_request_for_a_title_is_a_title() -> None:
    request = asked(TASK, tools=(), response_format=schema(title={"type": "string"}))
    assert role_of(request, {"x-claude-code-request-class": "auxiliary"}).name == "title"


def test_evidence_stays_short() -> None:
    assert len(role_of(asked(TASK), {"x-openai-subagent": "x" * 10_000}).evidence) < 100


# --- what its request is like ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "role", "evidence"),
    [
        (
            asked(TASK, system="Name it.", tools=(), response_format=schema(title={"type": "string"})),
            "title",
            "no tools and a schema with a title",
        ),
        (
            asked(TASK, tools=(), response_format=schema(isNewTopic={"type": "boolean"}, title={"type": "string"})),
            "title",
            "no tools and a schema with a title",
        ),
        (
            asked(TASK, system="Generate a short title for this conversation.", tools=()),
            "title",
            "no tools and a title asked for",
        ),
        (
            asked(("user", "Write a title of five words for this chat:"), TASK, system=None, tools=()),
            "title",
            "no tools and a title asked for",
        ),
        (
            asked(("user", "quota"), system=None, tools=(), max_tokens=1),
            "probe",
            "one token asked of one short message",
        ),
        (asked(("user", "<reminder>\nBe brief.\n</reminder>\nWarmup")), "probe", "a warm-up message"),
        (
            asked(TASK, system="You look for files. Report paths.", tools=("glob",)),
            "sub-agent",
            "another system prompt and other tools than the main conversation's",
        ),
        (
            asked(TASK, system="You look for files. Report paths."),
            "sub-agent",
            "another system prompt than the main conversation's",
        ),
        (
            asked(("user", "Is `rm -r build` safe to run?"), system=None, tools=()),
            "sub-agent",
            "another system prompt and no tools than the main conversation's",
        ),
        (
            asked(TASK, system=f"{AGENT} You are run by the main agent, and report to it.", tools=("bash", "edit")),
            "sub-agent",
            "another system prompt and other tools than the main conversation's",
        ),
        (asked(TASK, tools=("glob",)), "sub-agent", "none of the main conversation's tools"),
        (asked(("user", "And now the docs"), tools=("bash",)), "main", "the main conversation's system prompt"),
        (
            asked(TASK, system=f"{AGENT} Today is Monday.", tools=(*TOOLS, "web")),
            "main",
            "the main conversation's tools, and nearly its system prompt",
        ),
    ],
)
def test_the_shape_of_a_conversation_that_begins_decides(request_: Request, role: BranchRole, evidence: str) -> None:
    assert role_of(request_) == Role(role, evidence)


@pytest.mark.parametrize(
    "request_",
    [
        asked(("user", "Give the page a title that names the session")),  # an agent with tools at its work
        asked(TASK, tools=(), response_format=schema(title={}, author={}, year={})),
        asked(("user", "quota"), max_tokens=100),
        asked(("user", "Which is right, A or B? Answer with one letter."), max_tokens=1, tools=()),
        asked(("user", "Summarize the conversation in notes.txt. Do not use any tools but bash.")),
    ],
)
def test_what_only_resembles_a_title_a_probe_or_a_compaction_is_the_agents_work(request_: Request) -> None:
    assert taken(Roles(), {}, request_, None) == MAIN


@pytest.mark.parametrize(
    ("system", "parameters", "role"),
    [
        ("Generate a title of 3-7 words for this coding session.", TITLE_SCHEMA, "title"),
        ("Generate a title of 3-7 words for this coding session.", {"type": "object"}, "main"),
        ("You keep notes.", TITLE_SCHEMA, "main"),
    ],
    ids=["asked for and taken", "asked for alone", "taken alone"],
)
def test_a_title_may_be_asked_for_as_a_functions_arguments(
    system: str, parameters: dict[str, object], role: BranchRole
) -> None:
    request = asked(TASK, system=system, tools=("respond_in_schema",))
    conversation = replace(request.conversation, tools=(Tool("respond_in_schema", "", parameters),))
    assert taken(Roles(), {}, replace(request, conversation=conversation), None).name == role


@pytest.mark.parametrize("parent", ["main", "sub-agent", "compaction", "title", "probe"])
def test_a_turn_that_continues_another_has_its_role(parent: BranchRole) -> None:
    title = schema(title={"type": "string"})
    request = asked(TASK, DONE, ("user", "And now?"), system="You sum up chats.", tools=(), response_format=title)
    assert role_of(request, parent=Role(parent, "")) == Role(parent, f"continues a {parent} turn")


# --- compaction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", [MAIN, Role("sub-agent", ""), None])
def test_an_agent_asked_for_a_summary_and_kept_from_its_tools_is_compacted(parent: Role | None) -> None:
    told = role_of(asked(TASK, DONE, ("user", f"{NO_TOOLS}\n\n{SUMMARY}")), parent=parent)
    assert told == Role("compaction", "a summary of the conversation asked for, and no tools allowed")
    taken = role_of(asked(TASK, DONE, ("user", SUMMARY), tools=()), parent=parent)
    assert taken == Role("compaction", "a summary of the conversation asked for, without tools")


@pytest.mark.parametrize(
    "text",
    [
        "You perform a context compaction. Write what another model needs to resume the task.",
        "Your context is nearly full. Write a hand-off note to yourself for when the conversation above is gone.",
        "Compact this conversation. Keep errors and decisions.",
        "Create a condensed record of the whole chat so far.",
    ],
)
def test_compaction_is_known_in_several_wordings(text: str) -> None:
    assert role_of(asked(TASK, DONE, ("user", text), tools=()), parent=MAIN).name == "compaction"


@pytest.mark.parametrize(
    "system", ["You are an assistant that summarizes conversations.", "You compact a chat's history into a record."]
)
def test_an_agent_made_for_summaries_compacts(system: str) -> None:
    role = role_of(asked(("user", "user: Fix the bug\nassistant: It is fixed."), system=system, tools=()))
    assert role == Role("compaction", "a system prompt for summaries of conversations")


def test_an_agent_that_knows_of_summaries_is_not_one_made_for_them() -> None:
    system = f"{AGENT} The history of the conversation is summarized when it grows."
    again = asked(TASK, system=f"{system} Today is Monday.")
    assert role_of(again, known=asked(TASK, system=system)).name == "main"


def test_a_sub_agents_compaction_is_a_compaction() -> None:
    request = asked(TASK, DONE, ("user", f"{NO_TOOLS}\n\n{SUMMARY}"))
    assert role_of(request, {"x-claude-code-agent-id": "a1"}, Role("sub-agent", "")).name == "compaction"


@pytest.mark.parametrize(
    "text", ["Summarize our conversation for me, please.", "Do not call any tools. Why does parse.py fail?", "Go on."]
)
def test_a_user_of_an_agent_with_tools_may_ask_for_a_summary(text: str) -> None:
    assert role_of(asked(TASK, DONE, ("user", text)), parent=MAIN) == Role("main", "continues a main turn")


def test_a_user_of_a_bare_agent_may_ask_for_a_summary_too() -> None:
    bare = asked(TASK, system=None, tools=())
    request = asked(TASK, DONE, ("user", "Summarize our chat."), system=None, tools=())
    assert role_of(request, parent=MAIN, known=bare).name == "main"
    request = asked(TASK, DONE, ("user", SUMMARY), system=None, tools=())
    assert role_of(request, parent=MAIN, known=bare).name == "compaction"


def test_an_agent_goes_on_after_a_summary_that_stays_in_the_conversation() -> None:
    compacted = Role("compaction", "")
    after = (TASK, DONE, ("user", SUMMARY), ("assistant", "A bug was fixed."), ("user", "Now write a test"))
    assert role_of(asked(*after), parent=compacted).name == "main"
    assert role_of(asked(*after, tools=()), parent=compacted).name == "compaction"


def test_what_follows_a_compaction_is_main_again() -> None:
    roles = Roles()
    taken(roles, {}, asked(TASK), None)
    summary = asked(TASK, DONE, ("user", SUMMARY), tools=())
    assert taken(roles, {}, summary, MAIN).name == "compaction"
    successor = asked(("user", "This is what was done so far: a bug was fixed. Go on."))
    assert taken(roles, {}, successor, None) == Role("main", "the main conversation's system prompt")


# --- what the main conversation is like --------------------------------------------------------------------------


def test_a_bare_agent_is_main() -> None:
    assert taken(Roles(), {}, asked(("user", "2 + 2?"), system=None, tools=()), None) == MAIN


def test_the_first_conversation_with_tools_is_main_whatever_was_asked_on_the_side_before() -> None:
    roles = Roles()
    taken(roles, {}, asked(("user", "Is this request safe?"), system="You are a judge.", tools=()), None)
    assert taken(roles, {}, asked(TASK), None) == Role("main", "the first conversation with tools")
    assert taken(roles, {}, asked(TASK, system="You look for files.", tools=("glob",)), None).name == "sub-agent"


@pytest.mark.parametrize("before", [(), (asked(TASK, system="Say if this is new.", tools=()),)], ids=["first", "later"])
def test_what_has_no_tools_is_on_the_side_of_an_agent_whose_first_turn_is_not_recorded_yet(
    before: tuple[Request, ...],
) -> None:
    roles = Roles()
    for request in before:
        taken(roles, {}, request, None)
    assert roles.of({}, asked(TASK), None).name == "main"
    aside = asked(TASK, system="Say if this is new.", tools=())
    assert taken(roles, {}, aside, None).name == "sub-agent"
    assert taken(roles, {"x-session-id": "another"}, aside, None).name == "main"


@pytest.mark.parametrize("tools", [TOOLS, ()], ids=["with tools", "without"])
def test_of_agents_that_begin_at_the_same_time_the_first_to_end_makes_no_other_a_sub_agent(
    tools: Sequence[str],
) -> None:
    roles = Roles()
    slow, quick = (asked(TASK, system=system, tools=tools) for system in (AGENT, "You look for files."))
    role = roles.of({}, slow, None)
    taken(roles, {}, quick, None)
    assert roles.again({}, slow, role) == role == MAIN


def test_what_was_asked_before_an_agent_at_work_began_is_on_its_side_if_it_ends_behind() -> None:
    roles = Roles()
    aside = asked(TASK, system="Say if this is new.", tools=())
    role = roles.of({}, aside, None)
    assert role == MAIN
    roles.of({}, asked(TASK), None)
    assert roles.again({}, aside, role).name == "sub-agent"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"X-Claude-Code-Session-Id": "a"}, {"x-claude-code-session-id": "b"}),
        ({"session-id": "a"}, {"session_id": "b"}),
        ({"x-session-id": "a"}, {"x-session-id": "b"}),
        ({"prompt_cache_key": "a"}, {"prompt_cache_key": "b"}),
        ({"user_id": "user_1_session_a"}, {"user_id": "user_1_session_b"}),
        (
            {"user_id": json.dumps({"device_id": "d", "session_id": "a"})},
            {"user_id": json.dumps({"device_id": "d", "session_id": "b"})},
        ),
    ],
)
def test_each_session_of_the_client_has_a_main_conversation(first: dict[str, str], second: dict[str, str]) -> None:
    """The names with an underscore come in the body."""

    def began(said: dict[str, str], system: str) -> str:
        in_body = any(name in ("prompt_cache_key", "user_id") for name in said)
        request = asked(TASK, system=system, hints=said if in_body else {})
        return taken(roles, CIMultiDict({} if in_body else said), request, None).name

    roles = Roles()
    other = "You look for files. Report paths."
    assert [began(first, AGENT), began(first, other), began(second, other)] == ["main", "sub-agent", "main"]


def test_a_user_id_says_the_session_whatever_else_it_says() -> None:
    roles = Roles()
    ids = [json.dumps({"session_id": "a", "device_id": device}) for device in ("d", "e")]
    assert taken(roles, {}, asked(TASK, hints={"user_id": ids[0]}), None) == MAIN
    assert taken(roles, {}, asked(TASK, system="You look.", hints={"user_id": ids[1]}), None).name == "sub-agent"


def test_a_main_conversation_recorded_before_is_known_again_by_a_turn_that_continues_it() -> None:
    roles = Roles()
    assert taken(roles, {}, asked(TASK, DONE, ("user", "go on")), MAIN).name == "main"
    assert taken(roles, {}, asked(TASK, system="You look for files."), None).name == "sub-agent"


# --- as agents send it: the beginnings of sessions, cut small ----------------------------------------------------


def test_claude_code_asks_for_a_title_first() -> None:
    user_id = json.dumps({"device_id": "0", "account_uuid": "", "session_id": "8b58d8e1"})
    headers = CIMultiDict({"X-Claude-Code-Session-Id": "8b58d8e1", "x-app": "cli"})
    system = [{"type": "text", "text": "Rob ril a Barodo fisis."}]
    tool = {"name": "Bash", "description": "", "input_schema": {"type": "object"}}
    text = {"type": "text", "text": "Run echo hello and tell me the output"}
    common = {"model": "m", "metadata": {"user_id": user_id}, "max_tokens": 64000, "stream": True}
    title = common | {
        "messages": [{"role": "user", "content": [{"type": "text", "text": f"<fodosor>\n{text['text']}\n</fodosor>"}]}],
        "system": [*system, {"type": "text", "text": "Ribidipa a pebenim litab (3-7 lefod)."}],
        "tools": [],
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": TITLE_SCHEMA}},
    }
    work = common | {
        "messages": [{"role": "user", "content": [text]}, {"role": "system", "content": "Lokonosar fisis sopiv."}],
        "system": [*system, {"type": "text", "text": "\nRob ril an kapatavakel fisis tane buron moben."}],
        "tools": [tool],
        "output_config": {"effort": "high"},
    }
    roles = Roles()
    told = [taken(roles, headers, messages.parse_request(json.dumps(body).encode()), None) for body in (title, work)]
    assert told == [Role("title", "no tools and a schema with a title"), MAIN]


def test_opencode_asks_for_a_title_first_and_its_sub_agents_name_their_parent() -> None:
    headers = {"x-session-affinity": "ses_a", "x-session-id": "ses_a"}
    task = ("user", '"Run echo hello and tell me the output"')
    named = ("user", "Generate a title for this conversation:\n")
    title = asked(named, task, system="Rob ril a litab torelirof.", tools=())
    work = asked(task, system="Rob ril vivimori, an kapatavakel Bor mida.", tools=("bash", "edit"))
    child = asked(("user", "Find it"), system="Rob ril vivimori, an kapatavakel Bor mida.", tools=("bash",))
    roles = Roles()
    told = [taken(roles, CIMultiDict(headers), request, None) for request in (title, work)]
    told.append(taken(roles, CIMultiDict({"x-session-id": "ses_b", "x-parent-session-id": "ses_a"}), child, None))
    assert told == [
        Role("title", "no tools and a title asked for"),
        MAIN,
        Role("sub-agent", "x-parent-session-id: ses_a"),
    ]


def test_codex_says_whose_thread_a_request_is_of() -> None:
    body = {
        "model": "m",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rob ril a fisis."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Run echo hello"}]},
        ],
        "tools": [{"type": "function", "name": "exec_command", "parameters": {"type": "object"}}],
        "prompt_cache_key": "01a2",
    }
    request = responses.parse_request(json.dumps(body).encode())

    def headers(thread: str, **values: str) -> CIMultiDict[str]:
        said = {"session_id": "01a2", "thread_id": thread, "window_id": f"{thread}:0", **values}
        own = {"session-id": "01a2", "thread-id": thread, "x-codex-window-id": f"{thread}:0"}
        return CIMultiDict({**own, **turn(**said)})

    roles = Roles()
    main = taken(roles, headers("01a2", request_kind="turn", thread_source="user"), request, None)
    child = taken(roles, headers("01a3", request_kind="turn", thread_source="subagent"), request, None)
    summary = taken(roles, headers("01a2", request_kind="compaction", thread_source="user"), request, main)
    assert [role.name for role in (main, child, summary)] == ["main", "sub-agent", "compaction"]


def test_a_request_that_failed_does_not_say_what_the_main_conversation_is_like() -> None:
    roles = Roles()
    helper, work = asked(TASK, system="You look for files."), asked(TASK)
    assert roles.of({}, helper, None).name == "main"
    assert taken(roles, {}, work, None) == MAIN
    assert taken(roles, {}, helper, None).name == "sub-agent"


def test_bytes_of_a_header_that_are_no_text_are_replaced() -> None:
    """What is recorded of a request is written as JSON, which has no place for them."""
    headers = {"x-session-id": "caf\udce9"}
    assert client_session(headers, new_call("hello").request) == "caf\ufffd"
