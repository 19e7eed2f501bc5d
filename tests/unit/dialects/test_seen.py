"""What a session has sent before comes out as the same objects; otherwise a body reads as it would alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.dialects import chat, messages, responses
from stenograph.dialects.base import Request
from stenograph.dialects.minted import seal
from stenograph.dialects.seen import Seen
from stenograph.errors import RequestError
from support.arbitrary import values
from support.responses import AGENTS, NAME, OTHER, PATCH, SHELL

Parse = Callable[..., Request]

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "é ☂"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    {"role": "user", "content": "x"},
    {"role": "nobody", "content": "x"},
    {"role": "user", "content": [{"type": "image_url"}]},
    None,
]
TEXT = {"type": "text", "text": "hi"}
THOUGHT = {"type": "thinking", "thinking": "", "signature": seal(NAME, "hm")}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
MESSAGES = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": [THOUGHT, TEXT, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}, TEXT]},
    {"role": "assistant", "content": [TEXT, {"type": "server_tool_use"}, {"type": "web_search_tool_result"}]},
    {"role": "system", "content": "s"},
    {"role": "tool", "content": "x"},
    {"role": "user", "content": [{"type": "image"}]},
    7,
]
ADDED = {"type": "additional_tools", "tools": [{"type": "function", "name": "added"}]}
RESPONSES = [
    {"role": "user", "content": "x"},
    {"type": "reasoning", "id": f"rs_{NAME}", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "reasoning", "summary": [], "encrypted_content": seal(OTHER, "so")},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
    {"type": "function_call", "id": f"fc_{NAME}_0", "call_id": "call_1", "name": "shell", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "2"},
    {"type": "item_reference", "id": f"msg_{OTHER}"},
    {"type": "web_search_call"},
    ADDED,
    {"type": "additional_tools", "tools": [{"type": "function", "name": "shell", "parameters": 3}]},
    {"role": "nobody", "content": "x"},
    {"type": "item_reference", "id": "else"},
    [],
]
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "search"}
MEMORY = {"type": "memory_20250818", "name": "memory"}

MARKED = {"cache_control": {"type": "ephemeral"}}

# By protocol: how it is read, the list that comes again, what is in it, and the rest of a body.
Case = tuple[Parse, str, list[Any], dict[str, list[Any]]]
CASES: dict[str, Case] = {
    "chat": (chat.parse_request, "messages", CHAT, {"tools": [[FUNCTION], [{"type": "x"}]], "tool_choice": ["none"]}),
    "messages": (
        messages.parse_request,
        "messages",
        MESSAGES,
        {"system": ["s", [TEXT], 3], "tools": [[ADD, SEARCH], [MEMORY], [3]], "tool_choice": [{"type": "none"}]},
    ),
    "count": (messages.parse_count, "messages", MESSAGES, {"tools": [[ADD, SEARCH], [MEMORY]], "system": ["s"]}),
    "responses": (
        responses.parse_request,
        "input",
        RESPONSES,
        {
            "instructions": ["s", "", 3],
            "tools": [[SHELL, AGENTS], [PATCH, SHELL], [SHELL, {**SHELL, "type": "custom"}], {}],
            "tool_choice": ["none", {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "shell"}]}],
        },
    ),
}
each_protocol = pytest.mark.parametrize("protocol", CASES)


def told(parse: Parse, body: bytes, seen: Seen | None) -> Any:
    """All that a request says, or the error."""
    try:
        request = parse(body, seen)
    except RequestError as e:
        return str(e), e.param, e.status, e.code
    said = {one.name: getattr(request, one.name) for one in fields(request)}
    said["echo"] = orjson.dumps(said.get("echo"))
    return said, [message.turn for message in request.conversation.messages]


JUNK = [b"", b"\xff", b"\xc3", b"\\", b'"', b"\\ud800", b"\\u0041", b"NaN", b"01", b"1e999", b",", b" ", b"\x01", b"["]
JUNK += [b"{", b"}", b"]", b"null", b"\xef\xbb\xbf", b"[" * 1030, b'"messages":[1],', b'"input":["\xff"],', b'"tools":']


@st.composite
def bodies(draw: st.DrawFn, protocol: str) -> bytes:
    """Bodies of one conversation, more or less; some are cut up, written otherwise, or hold anything."""
    _, name, items, rest = CASES[protocol]
    body: dict[str, Any] = {"max_tokens": 9}
    body |= {field: draw(st.sampled_from(given)) for field, given in rest.items() if draw(st.booleans())}
    body[name] = draw(st.lists(st.sampled_from(items[:5] * 3 + items), max_size=8) | st.just(items[:5]))
    if draw(st.integers(0, 9)) == 0:
        body[draw(st.sampled_from(sorted(body)))] = draw(values(["role", "content", "type", "text", "id"]))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]))
    raw = json.dumps(body, separators=separators, ensure_ascii=draw(st.booleans()), sort_keys=draw(st.booleans()))
    written = raw.encode(errors="surrogatepass")
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at = draw(st.integers(0, len(written)))
        written = written[:at] + draw(st.sampled_from(JUNK)) + written[at + draw(st.integers(0, 2)) :]
    return written


@each_protocol
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_body_reads_the_same_whatever_was_seen(protocol: str, data: st.DataObject) -> None:
    parse, seen = CASES[protocol][0], Seen()
    for body in data.draw(st.lists(bodies(protocol), min_size=2, max_size=6)):
        assert told(parse, body, seen) == told(parse, body, None)


@st.composite
def requests(draw: st.DrawFn, protocol: str) -> list[bytes]:
    """Requests of a few conversations by turns, each changed as clients change theirs."""
    _, name, items, rest = CASES[protocol]
    conversations = [draw(st.lists(st.sampled_from(items[:5]), min_size=1, max_size=4)) for _ in range(2)]
    tools, is_first = rest["tools"][0], draw(st.booleans())
    separators = draw(st.sampled_from([(",", ":"), (" ,\n", " :\t")]))
    bodies = []
    for _ in range(draw(st.integers(2, 9))):
        said = draw(st.sampled_from(conversations))
        at = draw(st.integers(0, len(said) - 1))
        match draw(st.sampled_from(["add", "add", "add", "rewind", "edit", "swap", "fork", "again"])):
            case "add":
                said += draw(st.lists(st.sampled_from(items[:5] * 4 + items), min_size=1, max_size=3))
            case "rewind":
                del said[at + 1 :]
            case "edit":
                said[at] = draw(st.sampled_from(items))
            case "swap":
                said[at], said[-1] = said[-1], said[at]
            case "fork":
                conversations.append(said[: at + 1])
        marked = draw(st.sets(st.integers(len(said) - 3, len(said) - 1)))
        sent = [one | MARKED if i in marked and isinstance(one, dict) else one for i, one in enumerate(said)]
        head, tail = {"max_tokens": 9, name: sent}, {"tools": tools, "stream": draw(st.booleans())}
        body = json.dumps(head | tail if is_first else tail | head, separators=separators).encode()
        if draw(st.integers(0, 3)) == 0:
            at = draw(st.integers(0, len(body)))
            other = [b'"%s":[{"role":"user","content":"y"}],' % name.encode(), b"{", b"},", b"},{"]
            body = body[:at] + draw(st.sampled_from(JUNK + other)) + body[at + draw(st.integers(0, 2)) :]
        bodies.append(body)
    return bodies


@each_protocol
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_conversations_that_go_on_read_the_same_whatever_was_seen(protocol: str, data: st.DataObject) -> None:
    parse, seen = CASES[protocol][0], Seen()
    for body in data.draw(requests(protocol)):
        assert told(parse, body, seen) == told(parse, body, None)


def objects(parse: Parse, bodies: list[bytes], is_begun: bool) -> list[Any]:
    """A number for each object that a session's requests are read to, or the error; `is_begun`: known by beginnings."""
    seen, numbers, read = Seen(), dict[int, int](), []
    for body in bodies:
        if not is_begun:
            seen.prefixes.clear()
        try:
            read.append(parse(body, seen).conversation)
        except RequestError as e:
            read.append(str(e))
    given = [one for said in read for one in ([said] if isinstance(said, str) else (*said.messages, *said.tools))]
    return [one if isinstance(one, str) else numbers.setdefault(id(one), len(numbers)) for one in given]


@each_protocol
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_known_by_a_beginning_is_the_objects_known_one_by_one(protocol: str, data: st.DataObject) -> None:
    parse, bodies = CASES[protocol][0], data.draw(requests(protocol))
    assert objects(parse, bodies, is_begun=True) == objects(parse, bodies, is_begun=False)


# Items of two turns, and of none that an id tells, which may go on with a reply that was read before; and others.
SAID = [
    *RESPONSES[:10],
    *({**item, "id": f"{kind}_{OTHER}"} for kind, item in (("rs", RESPONSES[1]), ("msg", RESPONSES[3]))),
    *(
        {"type": "function_call", "call_id": "c", "name": "f", "id": f"fc_{turn}_1"}
        for turn in (NAME, OTHER, "elsewhere")
    ),
    {"type": "item_reference", "id": f"rs_{NAME}"},
]


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.sampled_from(SAID), min_size=1, max_size=4)), max_size=9))
@settings(max_examples=400, deadline=None)
def test_replies_of_several_items_are_gone_on_with_as_if_they_were_read_at_once(turns: list[tuple[int, Any]]) -> None:
    seen, said, bodies = Seen(), [], []
    for num_dropped, added in turns:
        said = [*said[: max(len(said) - num_dropped, 0)], *added]
        bodies.append(written("input", said))
        assert told(responses.parse_request, bodies[-1], seen) == told(responses.parse_request, bodies[-1], None)
    begun, one_by_one = (objects(responses.parse_request, bodies, is_begun) for is_begun in (True, False))
    assert begun == one_by_one


def written(name: str, items: list[Any], **rest: Any) -> bytes:
    return json.dumps({"max_tokens": 9, **rest, name: items}).encode()


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@each_protocol
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'"metadata": {"a": "\xff"}', id="bytes that are no text"),
        pytest.param(b'"metadata": "\\ud800"', id="half a character"),
        pytest.param(b'"metadata": 1e999', id="a number that is none"),
        pytest.param(b'"tools": "\xff", "tools": []', id="a value that a later one replaces"),
        pytest.param(b'"metadata": ' + deep(1022), id="as deep as it may be"),
        pytest.param(b'"metadata": ' + deep(1030), id="too deep"),
        pytest.param(b'"messages": [{"role": "user", "content": "y"}], "input": "y"', id="another list"),
        pytest.param(b'"m\\u0065ssages": [], "\\u0069nput": []', id="names written otherwise"),
        pytest.param(b'"messages": null, "input": null', id="no list"),
        pytest.param(b'"tools": null, "system": null, "instructions": null', id="nulls"),
        pytest.param(b'"":"",', id="a comma that nothing follows"),
    ],
)
def test_what_stands_beside_known_messages_is_read_as_strictly(protocol: str, raw: bytes) -> None:
    parse, name, items, _ = CASES[protocol]
    seen = Seen()
    known = written(name, items[:5])
    parse(known, seen)
    for body in (known[:-1] + b", " + raw + b"}", b"{" + raw + b", " + known[1:], known + raw, raw, b""):
        assert told(parse, body, seen) == told(parse, body, None)


@each_protocol
def test_a_body_that_begins_as_another_is_read_as_strictly(protocol: str) -> None:
    parse, name, items, _ = CASES[protocol]
    known, key = written(name, items[:5]), b'"%s": ' % name.encode()
    begun = known[: known.rindex(json.dumps(items[4]).encode())]
    one = json.dumps(items[0]).encode()
    ends = [b"", b"]}", b" ]}", b"{", b"{]}", b"{}]}", b"{},]}", b"{},{}]}", b"null]}", b'"{"]}', b"[]]}", b"[{}]]}"]
    ends += [b",%s]}" % one, b"%s %s]}" % (one, one), b"%s]]}" % one, b"%s}" % one, b"%s], []}" % one, b"%s]" % one]
    ends += [b"%s], %s%s}" % (one, key, later) for later in (b"[]", b"null", b'"y"', b"[3]", b"[%s]" % one, b"{}")]
    ends += [b'%s], "%sx": 3}' % (one, name.encode()), b'%s], "metadata": {%s[]}}' % (one, key)]
    bodies = [begun + end for end in ends]
    bodies += [b'{"metadata": %s, %s[%s]}' % (known, key, one), json.dumps({"metadata": known.decode()}).encode()]
    bodies += [known.replace(key, key + b"[%s], " % one + key), known.replace(b", ", b" , ")]
    for body in bodies:
        seen = Seen()
        parse(known, seen)
        for again in (body, body, known, body[:-2] + b", %s]}" % one):
            assert told(parse, again, seen) == told(parse, again, None), again


@each_protocol
def test_what_was_seen_is_the_same_objects_again(protocol: str) -> None:
    parse, name, items, rest = CASES[protocol]
    seen = Seen()
    given = {field: values[0] for field, values in rest.items() if field != "tool_choice"}
    first = parse(written(name, items[:3], **given), seen).conversation
    repeated = parse(written(name, items[:3], **given), seen).conversation.messages
    assert [id(one) for one in repeated] == [id(one) for one in first.messages]
    again = parse(written(name, items[:5], stream=True, **given), seen).conversation
    assert len(again.messages) > len(first.messages) > 1
    unlike = {"responses": 1}.get(protocol, 0)  # what a turn wrote in several items went on
    kept = len(first.messages) - unlike
    assert [id(one) for one in again.messages[:kept]] == [id(one) for one in first.messages[:kept]]
    assert again.tools is first.tools


@each_protocol
def test_a_body_that_goes_on_is_known_by_how_it_begins(protocol: str) -> None:
    parse, name, items, _ = CASES[protocol]
    seen = Seen()
    first = parse(written(name, items[:5]), seen).conversation.messages
    seen.items.clear()  # one by one they are not known any more
    again = parse(written(name, [*items[:5], *items[:3]]), seen).conversation.messages
    kept = len(first) - 2  # the last was left to be read, and a turn that wrote several items may be put together again
    assert kept > 0
    assert [id(one) for one in again[:kept]] == [id(one) for one in first[:kept]]


def test_a_reply_of_several_items_is_the_same_object_again() -> None:
    seen = Seen()
    said = [RESPONSES[0], RESPONSES[1], RESPONSES[3], RESPONSES[4], RESPONSES[5]]
    first = responses.parse_request(written("input", said), seen).conversation.messages
    again = responses.parse_request(written("input", [*said, RESPONSES[0]]), seen).conversation.messages
    assert [message.role for message in first] == ["user", "assistant", "tool"]
    assert [id(message) for message in again[:3]] == [id(message) for message in first]


def test_items_that_add_tools_are_read_once() -> None:
    seen = Seen()
    first = responses.parse_request(written("input", [RESPONSES[0], ADDED], tools=[SHELL]), seen).conversation
    again = responses.parse_request(written("input", [RESPONSES[0], ADDED, *RESPONSES[4:6]], tools=[SHELL]), seen)
    assert [tool.name for tool in first.tools] == ["shell", "added"]
    assert again.conversation.tools is first.tools
    fewer = responses.parse_request(written("input", RESPONSES[:1], tools=[SHELL]), seen).conversation
    assert [tool.name for tool in fewer.tools] == ["shell"]


@each_protocol
def test_an_error_names_the_place_where_it_stands_this_time(protocol: str) -> None:
    parse, name, items, _ = CASES[protocol]
    wrong, seen = {"role": "nobody", "content": "x"}, Seen()
    for i in (1, 3, 3, 2):
        with pytest.raises(RequestError) as refused:
            parse(written(name, [*items[:1] * i, wrong, *items[:1]]), seen)
        assert refused.value.param == f"{name}[{i}].role"


def test_an_added_tools_error_names_the_place_where_it_stands_this_time() -> None:
    seen = Seen()
    for i in (1, 2):
        with pytest.raises(RequestError) as refused:
            responses.parse_request(written("input", [*RESPONSES[:1] * i, RESPONSES[9], *RESPONSES[:1]]), seen)
        assert refused.value.param == f"input[{i}].tools[0].parameters"


def test_notes_are_told_of_every_request_that_asks_in_vain() -> None:
    for parse, name, item in (
        (messages.parse_request, "messages", MESSAGES[3]),
        (responses.parse_request, "input", RESPONSES[7]),
    ):
        seen = Seen()
        first = parse(written(name, [item, CHAT[4]]), seen)
        assert first.notes
        assert parse(written(name, [item, CHAT[4], CHAT[4]]), seen).notes == first.notes
        assert parse(written(name, [CHAT[4]]), seen).notes == ()


def test_the_same_bytes_are_read_by_each_protocol_as_its_own() -> None:
    seen = Seen()
    said = [{"role": "assistant", "content": [TEXT, TEXT]}, {"role": "user", "content": [TEXT, TEXT]}, CHAT[4]]
    for _ in range(2):
        assert chat.parse_request(written("messages", said), seen).conversation.messages[1].content == "hihi"
        assert messages.parse_request(written("messages", said), seen).conversation.messages[1].content == "hi\nhi"
        assert responses.parse_request(written("input", [CHAT[4]] * 2), seen).conversation.messages[1].content == "x"


def test_tools_may_be_seen_and_not_be_called() -> None:
    seen = Seen()
    for choice, names in (("auto", ["add"]), ("none", []), ("auto", ["add"])):
        body = written("messages", CHAT[:2], tools=[FUNCTION], tool_choice=choice)
        assert [tool.name for tool in chat.parse_request(body, seen).conversation.tools] == names


def test_what_never_comes_again_is_forgotten() -> None:
    seen = Seen()

    def body(request: int) -> bytes:
        return orjson.dumps({"messages": [{"role": "user", "content": f"{request} {n}"} for n in range(400)]})

    for n in range(20):
        read = chat.parse_request(body(n), seen).conversation.messages
        assert [message.content for message in read] == [f"{n} {i}" for i in range(400)]
    assert sum(map(len, seen.items.values())) < 4000
    _, first, again = (chat.parse_request(body(20), seen).conversation.messages for _ in range(3))
    assert all(one is other for one, other in zip(first, again, strict=True))


def test_beginnings_are_forgotten_with_their_messages() -> None:
    seen = Seen()
    sent = [written("messages", [{"role": "user", "content": f"{n} {i}"} for i in range(400)]) for n in range(10)]
    first = [chat.parse_request(body, seen).conversation.messages for body in sent]
    assert sum(map(len, seen.items.values())) < 4000
    again = chat.parse_request(sent[0], seen).conversation.messages
    assert again == first[0]
    assert not any(one is other for one, other in zip(again, first[0], strict=True))
