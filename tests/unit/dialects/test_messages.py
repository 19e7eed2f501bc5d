"""Whatever JSON comes in, it is a record or a refusal that names the field; errors have the protocol's words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types.beta import (
    BetaMemoryTool20250818CreateCommand,
    BetaMemoryTool20250818DeleteCommand,
    BetaMemoryTool20250818InsertCommand,
    BetaMemoryTool20250818RenameCommand,
    BetaMemoryTool20250818StrReplaceCommand,
    BetaMemoryTool20250818ViewCommand,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.dialects import messages
from stenograph.dialects.messages import MessagesRequest
from stenograph.dialects.minted import seal
from stenograph.errors import ContextOverflow, EngineError, EngineUnavailable, RequestError
from stenograph.types import Message, Tool, ToolCall
from support.arbitrary import objects, values

USER = {"role": "user", "content": "hi"}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def read(*said: dict[str, Any], **fields: Any) -> MessagesRequest:
    return messages.parse_request(json.dumps({"max_tokens": 9, "messages": said or [USER], **fields}).encode())


def told(*said: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return read(*said, **fields).conversation.messages


def test_a_text_and_one_block_say_the_same() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = told({"role": "user", "content": [text("hi", **cached)]}, system=[text("Be brief.", **cached)])
    assert blocks == told(system="Be brief.") == (Message("system", "Be brief."), Message("user", "hi"))
    parts = [text("a"), text(""), text("b")]
    assert told({"role": "user", "content": parts}, system=parts) == (
        Message("system", "a\nb"),
        Message("user", "a\nb"),
    )


def test_a_seal_of_ours_names_the_turn_that_a_message_is_from() -> None:
    others = {"type": "thinking", "thinking": "hm", "signature": "c2lnbmF0dXJl"}
    sealed = {"type": "redacted_thinking", "data": seal("ab", "hm")}
    later = {"type": "thinking", "thinking": "so", "signature": seal("cd", "so")}
    blocks = [[others, sealed, later, text("a")], [others, text("a")], "a"]
    said = told(*[{"role": "assistant", "content": content} for content in blocks], USER)
    assert [message.turn for message in said] == ["turn_ab", None, None, None]


def test_instructions_stand_where_they_were_given() -> None:
    said = told(USER, {"role": "system", "content": [text("s")]}, {"role": "developer", "content": "d"}, system="first")
    assert [message.role for message in said] == ["system", "user", "system", "system"]
    assert [message.content for message in said] == ["first", "hi", "s", "d"]


def test_tool_results_and_texts_keep_their_order() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_ab_1", "content": [text("x"), text("y")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "other"},
        {"type": "tool_result", "tool_use_id": "o", "content": [{"type": "tool_reference", "tool_name": "add"}]},
    ]
    assert told({"role": "user", "content": [text("before"), *results, text("and"), text("after")]}) == (
        Message("user", "before"),
        Message("tool", "x\ny", tool_call_id="call_ab_1"),
        Message("tool", "", tool_call_id="other"),
        Message("tool", "add", tool_call_id="o"),
        Message("user", "and\nafter"),
    )
    assert told({"role": "user", "content": []}) == (Message("user", ""),)


def test_an_assistants_blocks_are_one_message() -> None:
    content = [
        {"type": "thinking", "thinking": "Hm", "signature": "c2lnbmF0dXJlLWZha2U="},
        text("One"),
        {"type": "thinking", "thinking": "", "signature": seal("ab", ", sealed")},
        {"type": "redacted_thinking", "data": seal("ab", ", too")},
        {"type": "redacted_thinking", "data": "somebody else's"},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        text(" two."),
        {"type": "tool_use", "id": "toolu_ab_0", "name": "add", "input": {"b": [1.0, "é"], "a": None}},
        {"type": "tool_use", "id": "x", "name": "add", "input": {"_raw": "{not json"}},
        {"type": "tool_use", "id": "y", "name": "add"},
        {"type": "tool_use", "id": "z", "name": "add", "input": "text"},
    ]
    request = read(USER, {"role": "assistant", "content": content}, USER)
    arguments = ['{"b":[1.0,"é"],"a":null}', "{not json", "{}", '"text"']
    ids = ["call_ab_0", "x", "y", "z"]
    calls = tuple(ToolCall(id, "add", raw) for id, raw in zip(ids, arguments, strict=True))
    assert request.conversation.messages[1] == Message("assistant", "One two.", "Hm, sealed, too", calls)
    assert request.notes == ("left_out:server_tool_use", "left_out:web_search_tool_result")


def test_a_real_clients_next_request_goes_on_from_its_last() -> None:
    """As Claude Code sends them: markers move, and its instructions turn from a block into a text."""
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [text("cc_version=2"), text("Be brief.", **cached)]
    asked = {"role": "user", "content": [text("<reminder>"), text("Run echo hello")]}
    first = told(asked, {"role": "system", "content": [text("# Notes", **cached)], "output_config": {}}, system=system)
    answer = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "", "signature": seal("ab", "Step by step.")},
            text("I will."),
            {"type": "tool_use", "id": "toolu_ab_0", "name": "Bash", "input": {"command": "echo hello"}},
        ],
    }
    result = {"type": "tool_result", "tool_use_id": "toolu_ab_0", "content": "hello", "is_error": False, **cached}
    notes = {"role": "system", "content": "# Notes", "output_config": {"effort": "medium"}}
    second = told(asked, notes, answer, {"role": "user", "content": [result]}, system=system)
    call = ToolCall("call_ab_0", "Bash", '{"command":"echo hello"}')
    reply = Message("assistant", "I will.", "Step by step.", (call,))
    assert second == (*first, reply, Message("tool", "hello", tool_call_id="call_ab_0"))


def test_tools_that_nobody_here_can_run_are_left_out_and_noted() -> None:
    foreign = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    request = read(tools=[*foreign, ADD, {**ADD, "type": "custom", "defer_loading": True}])
    assert request.conversation.tools == (Tool("add", "Adds.", ADD["input_schema"]),) * 2
    assert request.notes == ("left_out:web_search", "left_out:code_execution", "left_out:mcp_toolset")
    served = read(mcp_servers=[{"type": "url", "url": "x", "name": "y"}], container={"skills": []})
    assert served.notes == ("left_out:mcp_servers", "left_out:container")


EDITOR = ["command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"]


@pytest.mark.parametrize(
    ("kind", "name", "parameters", "commands"),
    [
        ("bash_20241022", "bash", ["command", "restart"], None),
        ("bash_20250124", "bash", ["command", "restart"], None),
        ("text_editor_20250124", "str_replace_editor", EDITOR, "view create str_replace insert undo_edit"),
        ("text_editor_20250429", "str_replace_based_edit_tool", EDITOR, "view create str_replace insert"),
        (
            "text_editor_20250728",
            "str_replace_based_edit_tool",
            [*EDITOR, "insert_text"],
            "view create str_replace insert",
        ),
    ],
)
def test_a_clients_own_tools_are_told_as_functions(
    kind: str, name: str, parameters: list[str], commands: str | None
) -> None:
    request = read(tools=[{"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}])
    (tool,) = request.conversation.tools
    properties = tool.parameters["properties"]
    assert (tool.name, sorted(properties), request.notes) == (name, sorted(parameters), ())
    assert commands is None or properties["command"]["enum"] == commands.split()
    assert set(tool.parameters["required"]) <= set(properties)


def test_the_memory_tool_takes_what_its_client_reads() -> None:
    (tool,) = read(tools=[{"type": "memory_20250818", "name": "memory"}]).conversation.tools
    kinds = [
        BetaMemoryTool20250818ViewCommand,
        BetaMemoryTool20250818CreateCommand,
        BetaMemoryTool20250818StrReplaceCommand,
        BetaMemoryTool20250818InsertCommand,
        BetaMemoryTool20250818DeleteCommand,
        BetaMemoryTool20250818RenameCommand,
    ]
    properties = tool.parameters["properties"]
    assert set(properties) == {name for kind in kinds for name in kind.model_fields}
    assert properties["command"]["enum"] == [kind.model_fields["command"].annotation.__args__[0] for kind in kinds]


def test_tools_stay_out_of_a_prompt_that_may_not_call() -> None:
    assert read(tools=[ADD], tool_choice={"type": "none"}).conversation.tools == ()
    request = read(tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert request.conversation.tools
    assert request.notes == ("ignored:disable_parallel_tool_use",)


def test_a_last_assistant_message_is_gone_on_with() -> None:
    assert read(USER, {"role": "assistant", "content": "The answer is"}).conversation.continues
    assert not read(USER, {"role": "assistant", "content": "The answer is "}, USER).conversation.continues


def test_sampling_format_and_session() -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "schema": schema}
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stop_sequences": ["END"]}
    request = read(
        **values,
        model="m",
        stream=True,
        session_id="steno_x",
        output_config={"effort": "high", "format": wanted},
        context_management={"edits": []},
        metadata={"user_id": "u"},
        thinking={"type": "adaptive", "display": "omitted"},
    )
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": ("END",), "max_tokens": 9}
    assert request.asked == asked
    assert (request.model, request.stream, request.session, request.grammar) == ("m", True, "steno_x", schema)
    assert request.hide_thinking
    assert not read(thinking={"type": "enabled", "budget_tokens": 2000}).hide_thinking
    assert read(output_format=wanted).grammar == schema
    assert read(session_id="somebody's").session is None
    assert read(top_k=-1).asked["top_k"] == 0


def test_counting_needs_no_limit() -> None:
    body = {"messages": [USER], "tools": [ADD], "system": "s"}
    request = messages.parse_count(json.dumps(body).encode())
    assert request.conversation == read(**body).conversation
    assert json.loads(messages.count(12)) == {"input_tokens": 12}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("thread", {"thread": {"type": "continue", "previous_message_id": "msg_1"}}),
    ("compaction", {"compaction": {"type": "summarize"}}),
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 1}]}),
    ("messages[0].content[1]", {"messages": [{"role": "user", "content": [text("x"), "y"]}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [IMAGE]}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]}),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [text(1)]}]}),  # type: ignore[arg-type]
    ("messages[0].content[0].tool_use_id", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
    (
        "messages[0].content[0].content[0].type",
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}]},
    ),
    ("messages[0].content[0].type", {"messages": [{"role": "assistant", "content": [{"type": "compaction"}]}, USER]}),
    ("messages[0].content[0].name", {"messages": [{"role": "assistant", "content": [{**USE, "name": ""}]}, USER]}),
    ("messages[0].content[0].input", {"messages": [{"role": "assistant", "content": [{**USE, "input": DEEP}]}, USER]}),
    ("messages[1].content", {"messages": [USER, {"role": "assistant", "content": "The answer is "}]}),
    ("messages[1].content", {"messages": [USER, {"role": "assistant", "content": [text("x"), USE]}]}),
    ("messages[1].content", {"messages": [USER, {"role": "assistant", "content": ""}]}),
    ("system[0].type", {"system": [IMAGE]}),
    ("tools[0].input_schema", {"tools": [{"name": "add"}]}),
    ("tools[0].name", {"tools": [{"input_schema": {}}]}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("tool_choice.type", {"tools": [ADD], "tool_choice": {"type": "any"}}),
    ("tool_choice.type", {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}),
    ("output_config.format.type", {"output_config": {"format": {"type": "grammar"}}}),
    ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    ("output_format.schema", {"output_format": {"type": "json_schema"}}),
    ("temperature", {"temperature": 3}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("thinking", {"thinking": "much"}),
    ("n", {"n": 2}),
    ("tools[1].type", {"tools": [ADD, {"type": "computer_20251124", "name": "computer"}]}),
    ("tools[0].type", {"tools": [{"type": "computer_toolset_20260801"}]}),
    ("tools[0].type", {"tools": [{"type": "browser_toolset_20260801"}]}),
    ("tools[0].name", {"tools": [{"type": "bash_20250124"}]}),
    ("seed", {"seed": "x"}),
    ("guided_json", {"guided_json": {"type": "object"}}),
]


def test_a_limit_of_nothing_is_refused_by_its_bounds() -> None:
    with pytest.raises(RequestError, match=r"^max_tokens: must be between 1 and 2147483647, got 0$"):
        read(max_tokens=0)


@pytest.mark.parametrize(("path", "fields"), REFUSED, ids=[f"{i}-{path}" for i, (path, _) in enumerate(REFUSED)])
def test_a_refusal_names_the_field(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        read(**fields)
    assert (refused.value.param, refused.value.status) == (path, 400)


WORDS = ("type", "text", "id", "name", "input", "input_schema", "content", "tool_use_id", "thinking", "signature")
WORDS += ("tool_use", "tool_result", "redacted_thinking", "data", "_raw", "json_schema", "schema", "format", "display")
VALUES = values(WORDS)

KINDS = st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "x_tool_result"])
FIELDS = ("text", "thinking", "signature", "data", "id", "name", "input", "tool_use_id", "content")
BLOCKS = st.lists(objects(type=KINDS | VALUES, **dict.fromkeys(FIELDS, VALUES)) | VALUES, max_size=3) | VALUES
SAID = objects(role=st.sampled_from(["user", "assistant", "system"]) | VALUES, content=BLOCKS)
TOOL_KINDS = st.sampled_from(["custom", "bash_20250124", "text_editor_1", "memory_20250818", "computer_20251124"])
TOP = ("model", "stream", "tool_choice", "temperature", "top_p", "top_k", "stop_sequences", "session_id", "thinking")
TOP += ("seed", "n")
BODIES = objects(
    max_tokens=st.just(9) | VALUES,
    messages=st.just([USER]) | st.lists(SAID, max_size=3) | VALUES,
    system=BLOCKS,
    tools=st.lists(objects(type=TOOL_KINDS | VALUES, name=VALUES, description=VALUES, input_schema=VALUES), max_size=2)
    | VALUES,
    output_config=objects(format=VALUES) | VALUES,
    output_format=VALUES,
    **dict.fromkeys(TOP, VALUES),
)


@given(BODIES | VALUES)
@settings(max_examples=400, deadline=None)
def test_any_json_is_read_or_refused(body: Any) -> None:
    for parse in (messages.parse_request, messages.parse_count):
        try:
            assert parse(json.dumps(body).encode()).conversation.messages
        except RequestError as e:
            told = json.loads(messages.error(e).body)
            assert told["error"]["message"]


@pytest.mark.parametrize(
    ("exception", "status", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (RequestError("x", status=401), 401, "authentication_error"),
        (RequestError("x", status=403), 403, "permission_error"),
        (RequestError("x", status=404), 404, "not_found_error"),
        (RequestError("x", status=409, retry=False), 409, "invalid_request_error"),
        (RequestError("x", status=413), 413, "request_too_large"),
        (EngineError("x", status=429, retry_after_s=1.5), 429, "rate_limit_error"),
        (EngineUnavailable("x"), 503, "overloaded_error"),
        (EngineError("x", status=500), 502, "api_error"),
        (ValueError("x"), 500, "api_error"),
    ],
)
def test_an_error_has_the_protocols_word(exception: Exception, status: int, kind: str) -> None:
    error = messages.error(exception)
    body = json.loads(error.body)
    assert (error.status, body["type"], body["error"]["type"]) == (status, "error", kind)


def test_a_thread_is_refused_so_that_clients_go_on_without_one() -> None:
    with pytest.raises(RequestError) as refused:
        read(thread={"type": "create"})
    told = messages.error(refused.value)
    assert (told.status, json.loads(told.body)["error"]["details"]) == (
        400,
        {"error_code": "thread_unsupported_request"},
    )


@pytest.mark.parametrize(("kind", "noted"), [("clear_thinking_20251015", False), ("clear_tool_uses_20250919", True)])
def test_edits_of_the_context_are_noted_where_nobody_makes_them(kind: str, noted: bool) -> None:
    request = read(context_management={"edits": [{"type": kind, "keep": "all"}]})
    assert request.notes == (("ignored:context_management",) if noted else ())


@pytest.mark.parametrize(
    ("fields", "notes"),
    [
        ({"thinking": {"type": "disabled"}}, ["ignored:thinking"]),
        ({"thinking": {"type": "between_tools"}}, ["ignored:thinking"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, ["ignored:thinking.budget_tokens"]),
        ({"thinking": {"type": "adaptive"}}, []),
        ({"output_config": {"effort": "high"}}, ["ignored:output_config.effort"]),
        ({"output_config": {"effort": None}}, []),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, ["ignored:output_config.task_budget"]),
    ],
)
def test_effort_that_is_not_made_is_noted(fields: dict[str, Any], notes: list[str]) -> None:
    assert read(**fields).notes == tuple(notes)


def test_a_prompt_that_leaves_no_room_says_so_in_anthropics_words() -> None:
    error = json.loads(messages.error(ContextOverflow(200_001, 200_000)).body)["error"]
    assert error == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 200001 tokens > 200000 maximum",
    }
