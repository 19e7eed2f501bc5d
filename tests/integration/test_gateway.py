"""A real client, a real gateway process, a scripted engine: what is said, what is recorded, what is refused."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

import stenograph
from support.serving import Server, serving, started, write_script

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = '{"a": 1.0e0,  "b":2}'
LINES: list[dict[str, Any]] = [
    {
        "when": "1 + 2",
        "reasoning": "A tool.",
        "content": "Well.",
        "tool_calls": [{"name": "add", "arguments": ARGUMENTS}],
    },
    {"when": "3", "content": "The answer is three."},
    {"when": "stop here", "content": "one END two"},
    {"when": "say hello", "content": "hello"},
    {"when": "too long", "content": "cut off here", "finish_reason": "length"},
    {"when": "fault cut", "content": "half of a sentence", "fault": "cut"},
    {"when": "fault counts", "content": "miscounted", "fault": "counts"},
    {"when": "fault error", "fault": "error"},
    {"when": "fault refuse", "fault": "refuse"},
    {"when": "fault overflow", "fault": "overflow"},
    {"when": "fault garbage", "fault": "garbage"},
    {"when": "fault hang", "fault": "hang"},
    {"when": "half a name", "text": '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call><|im_end|>'},
    {"when": "slowly", "content": "a slow answer", "fault": "pace:0.05"},
]
FAULTS = {"cut": 502, "counts": 502, "error": 502, "refuse": 503, "overflow": 400, "garbage": 502}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = write_script(tmp_path_factory.mktemp("script") / "script.jsonl", *LINES)
    settings = ("gateway.seal_timeout_s=0.2", "gateway.max_body_bytes=3000000", "model.thinking_retention=all")
    with serving("--engine", script, *(word for setting in settings for word in ("--set", setting))) as server:
        yield server


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def read_stream(stream: Any) -> tuple[str, list[Any], str | None]:
    """Content, tool calls and finish reason of a streamed answer."""
    content, calls, finish_reason = "", [], None
    for chunk in stream:
        if not chunk.choices:
            continue
        content += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
        finish_reason = chunk.choices[0].finish_reason or finish_reason
    return content, calls, finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_three_turns_with_a_tool_extend_one_branch(server: Server, stream: bool) -> None:
    session = server.open(metadata={"task_id": "t", "group_id": "g", "rollout_id": "r"})
    client = server.client(session)
    messages: list[Any] = [user("what is 1 + 2?")]
    answer = ask(client, messages, tools=[ADD], stream=stream)
    if stream:
        content, calls, finish_reason = read_stream(answer)
    else:
        choice = answer.choices[0]
        content, calls, finish_reason = choice.message.content, choice.message.tool_calls, choice.finish_reason
    assert (content, finish_reason) == ("Well.", "tool_calls")
    assert [(c.function.name, c.function.arguments) for c in calls] == [("add", ARGUMENTS)]

    call = {"id": calls[0].id, "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    said = {"role": "assistant", "content": content, "reasoning_content": "A tool.", "tool_calls": [call]}
    messages += [said, {"role": "tool", "tool_call_id": calls[0].id, "content": "3"}]
    answer = ask(client, messages, tools=[ADD], stream=stream)
    text = read_stream(answer)[0] if stream else answer.choices[0].message.content
    assert text == "The answer is three."

    server.call("POST", f"/sessions/{session['id']}/seal", {"reward": 1.0})
    (sample,) = server.call("GET", f"/sessions/{session['id']}/samples")
    tree = server.call("GET", f"/sessions/{session['id']}/tree?ids=1")
    assert [node["kind"] for node in tree["nodes"]] == ["context", "output", "context", "output"]
    assert [id for node in tree["nodes"] for id in node["ids"]] == sample["ids"]
    assert server.call("GET", f"/sessions/{session['id']}/drift") == []
    assert (sample["reward"], sample["task_id"], sample["group_id"], sample["rollout_id"]) == (1.0, "t", "g", "r")
    for node in tree["nodes"]:
        inside = range(node["start"], node["start"] + node["length"])
        sampled = node["kind"] == "output"
        assert all(sample["loss_mask"][i] == sampled for i in inside)
        assert all((sample["versions"][i] == 0) == sampled for i in inside)
        assert all((sample["rollout_logprobs"][i] != 0) == sampled for i in inside)
    ledger = server.call("GET", f"/sessions/{session['id']}/ledger")
    assert ledger["sampled"] == ledger["in_flight"] == sum(sample["loss_mask"])


def test_usage_counts_real_tokens(server: Server) -> None:
    session = server.open()
    answer = ask(server.client(session), [user("say hello")])
    (sample,) = server.call("GET", f"/sessions/{session['id']}/samples")
    assert answer.usage.completion_tokens == sum(sample["loss_mask"])
    assert answer.usage.total_tokens == len(sample["ids"])


def test_a_stop_string_ends_the_visible_text_and_keeps_what_was_sampled(server: Server) -> None:
    session = server.open()
    client = server.client(session)
    answer = ask(client, [user("stop here")], stop=["END"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one ", "stop")
    ask(client, [user("stop here"), {"role": "assistant", "content": "one "}, user("say hello")])
    (sample,) = server.call("GET", f"/sessions/{session['id']}/samples")
    assert [turn["ended_by"] for turn in sample["turns"]] == ["stop", "eos"]
    assert server.call("GET", f"/sessions/{session['id']}/drift") == []


def test_an_output_cut_by_length_is_closed_by_context(server: Server) -> None:
    session = server.open()
    client = server.client(session)
    answer = ask(client, [user("too long")])
    assert answer.choices[0].finish_reason == "length"
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    ask(client, [user("too long"), said, user("say hello")])
    (sample,) = server.call("GET", f"/sessions/{session['id']}/samples")
    first = sample["turns"][0]
    assert first["ended_by"] == "length"
    assert not sample["loss_mask"][first["end"]]


def test_an_edited_history_is_a_fork_that_is_said(server: Server) -> None:
    session = server.open()
    client = server.client(session)
    ask(client, [user("say hello")])
    ask(client, [user("say hello"), {"role": "assistant", "content": "HELLO"}, user("say hello")])
    (drift,) = server.call("GET", f"/sessions/{session['id']}/drift")
    assert (drift["cause"], drift["message"], drift["field"]) == ("message_changed", 1, "content")
    assert drift["token"] > 0
    assert len(server.call("GET", f"/sessions/{session['id']}/samples")) == 2


def test_identical_concurrent_calls_are_samples_of_their_own(server: Server) -> None:
    session = server.open()
    client = server.client(session)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ask(client, [user("say hello")]), range(4)))
    samples = server.call("GET", f"/sessions/{session['id']}/samples")
    assert len(samples) == 4
    contexts = [n for n in server.call("GET", f"/sessions/{session['id']}/tree")["nodes"] if n["kind"] == "context"]
    assert len(contexts) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_for_the_client_and_nothing_is_recorded(server: Server, fault: str, stream: bool) -> None:
    session = server.open()
    with pytest.raises(openai.APIError) as caught:
        read_stream(ask(server.client(session), [user(f"fault {fault}")], stream=True)) if stream else ask(
            server.client(session), [user(f"fault {fault}")]
        )
    if isinstance(caught.value, openai.APIStatusError):
        assert caught.value.status_code == FAULTS[fault]
    if fault == "overflow":
        assert caught.value.code == "context_length_exceeded"
    assert server.call("GET", f"/sessions/{session['id']}")["num_turns"] == 0


@pytest.mark.parametrize("fault", ["cut", "counts"])
def test_a_broken_stream_ends_without_its_end(server: Server, fault: str) -> None:
    session = server.open()
    body = json.dumps({"model": "x", "stream": True, "messages": [user(f"fault {fault}")]}).encode()
    received = post_raw(server, session, body)
    assert b'data: {"error":' in received
    assert b"[DONE]" not in received
    assert b'finish_reason":"' not in received
    assert not received.endswith(b"0\r\n\r\n")


def post_raw(server: Server, session: Any, body: bytes, headers: str = "") -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    path = f"/s/{session['id']}/v1/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session['api_key']}\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head += f"{headers}connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode("latin-1") + body)
        received = b""
        while data := connection.recv(65536):
            received += data
    return received


def test_a_call_whose_name_no_json_carries_stays_text(server: Server) -> None:
    session = server.open()
    content, calls, finish_reason = read_stream(ask(server.client(session), [user("half a name")], stream=True))
    assert "ud800" in content
    assert (calls, finish_reason) == ([], "stop")
    assert server.call("GET", f"/sessions/{session['id']}")["num_turns"] == 1


def test_bytes_that_are_no_text_are_refused(server: Server) -> None:
    session = server.open()
    body = json.dumps({"messages": [user("say hello")]}).encode()
    assert b" 401 " in post_raw(server, {**session, "api_key": "\xff"}, body)[:20]
    assert b" 400 " in post_raw(server, session, body, "content-encoding: gzip\r\n")[:20]
    unknown = {**session, "api_key": server.admin_key, "id": ".."}  # /s/../v1/...: the admin's own calls
    received = post_raw(server, unknown, body, "x-session-id: steno_\xff\r\n")
    assert b" 404 " in received[:20]
    assert b'"type":"invalid_request_error"' in received


def test_text_leaves_as_it_is_sampled(server: Server) -> None:
    times = []
    for chunk in ask(server.client(server.open()), [user("slowly")], stream=True):
        if chunk.choices and chunk.choices[0].delta.content:
            times.append(time.monotonic())
    assert len(times) >= 5
    assert times[-1] - times[0] > (len(times) - 1) * 0.03  # paced by the engine, not sent at once at the end


def test_a_client_that_goes_away_leaves_a_recorded_turn(server: Server) -> None:
    session = server.open()
    stream = ask(server.client(session), [user("slowly")], stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while server.call("GET", f"/sessions/{session['id']}")["num_turns"] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.call("GET", f"/sessions/{session['id']}")["num_turns"] == 1


def test_sealing_ends_what_hangs_and_refuses_what_comes(server: Server) -> None:
    session = server.open()
    client = server.client(session)
    failures: list[Exception] = []

    def hang() -> None:
        try:
            ask(client, [user("fault hang")])
        except openai.APIError as e:
            failures.append(e)

    thread = threading.Thread(target=hang)
    thread.start()
    time.sleep(0.3)
    assert server.call("POST", f"/sessions/{session['id']}/seal", {})["state"] == "sealed"
    thread.join(10)
    assert len(failures) == 1
    with pytest.raises(openai.ConflictError) as caught:
        ask(client, [user("say hello")])
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert server.call("GET", f"/sessions/{session['id']}")["num_turns"] == 0


def test_release_is_once_and_ends_the_address(server: Server) -> None:
    session = server.open()
    assert server.call("DELETE", f"/sessions/{session['id']}") == {"released": [session["id"]]}
    assert server.call("DELETE", f"/sessions/{session['id']}") == {"released": []}
    assert server.refused("GET", f"/sessions/{session['id']}")[0] == 404
    with pytest.raises(openai.AuthenticationError):
        ask(server.client(session), [user("say hello")])


def test_keys_open_their_own_session_alone(server: Server) -> None:
    mine, other = server.open(), server.open()
    body = json.dumps({"messages": [user("say hello")]}).encode()
    path = "/v1/chat/completions"
    assert server.refused("POST", f"/s/{other['id']}{path}", body, mine["api_key"])[0] == 403
    assert server.refused("POST", f"/s/{mine['id']}{path}", body, "wrong")[0] == 401
    assert server.refused("GET", f"/sessions/{mine['id']}/samples", None, mine["api_key"])[0] == 403
    assert server.refused("POST", f"/s/{mine['id']}/../{other['id']}{path}", body, mine["api_key"])[0] == 403
    assert server.raw("POST", path, body, mine["api_key"])[0] == 200
    assert server.raw("POST", f"/s/{mine['id']}{path}", body)[0] == 200
    assert server.call("GET", f"/sessions/{mine['id']}")["num_turns"] == 2
    assert server.call("GET", f"/sessions/{other['id']}")["num_turns"] == 0


def test_a_hint_chooses_a_session_for_the_admin_alone(server: Server) -> None:
    mine, other = server.open(), server.open()
    body = json.dumps({"messages": [user("say hello")], "session_id": other["id"]}).encode()
    assert server.raw("POST", "/v1/chat/completions", body, mine["api_key"])[0] == 200
    assert server.raw("POST", f"/s/{mine['id']}/v1/chat/completions", body)[0] == 200
    assert server.call("GET", f"/sessions/{mine['id']}")["num_turns"] == 2
    assert server.raw("POST", "/v1/chat/completions", body)[0] == 200
    assert server.call("GET", f"/sessions/{other['id']}")["num_turns"] == 1


def test_a_bad_session_is_told_what_is_wrong(server: Server) -> None:
    deep = b'{"metadata": {"a": ' + b"[" * 500 + b"]" * 500 + b"}}"
    for body, named in [(b'{"ttl_s": true}', "ttl_s"), (b'{"ttl_s": 1e999}', "JSON"), (deep, "metadata")]:
        status, error = server.refused("POST", "/sessions", body)
        assert (status, named in error["message"]) == (400, True)


def test_untraced_calls_leave_no_record(server: Server) -> None:
    session = server.open(traced=False)
    assert ask(server.client(session), [user("say hello")]).choices[0].message.content == "hello"
    assert server.call("GET", f"/sessions/{session['id']}")["num_turns"] == 1  # counted, and no more than that
    assert server.refused("GET", f"/sessions/{session['id']}/tree")[0] == 404
    admin = openai.OpenAI(base_url=server.url + "/v1", api_key=server.admin_key, max_retries=0)
    assert ask(admin, [user("say hello")]).choices[0].message.content == "hello"


def test_models_and_health(server: Server) -> None:
    assert [model.id for model in server.client(server.open()).models.list()] == ["stenograph"]
    assert server.call("GET", "/healthz") == {"status": "ok"}


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"{", "not JSON"),
    (b"[]", "an object"),
    (b"{}", "messages"),
    (b'{"messages": []}', "messages"),
    (b'{"messages": [{"role": "robot", "content": ""}]}', "messages[0].role"),
    (b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "images"),
    (b'{"messages": [{"role": "user", "content": "x"}], "n": 129}', "n:"),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "temperature"),
    (b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}', "tool_choice"),
    (
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}',
        "response_format",
    ),
    (b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}', "tools[0].function.name"),
]


@pytest.mark.parametrize(("body", "named"), BAD_BODIES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_bad_request_is_told_what_is_wrong(server: Server, body: bytes, named: str) -> None:
    session = server.open()
    status, error = server.refused("POST", f"/s/{session['id']}/v1/chat/completions", body, session["api_key"])
    assert status == 400
    assert named in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_a_body_of_megabytes_is_read_and_one_over_the_limit_is_refused(server: Server) -> None:
    session = server.open()
    large = json.dumps({"messages": [user("x" * 1_500_000 + "say hello")]}).encode()
    over = json.dumps({"messages": [user("x" * 3_000_000)]}).encode()
    status, error = server.refused("POST", f"/s/{session['id']}/v1/chat/completions", over, session["api_key"])
    assert (status, "max_body_bytes" in error["message"]) == (413, True)
    # The scripted engine's context holds a million tokens, and the built-in tokenizer spells x by x.
    status, error = server.refused("POST", f"/s/{session['id']}/v1/chat/completions", large, session["api_key"])
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_unknown_addresses_keep_the_error_shape(server: Server) -> None:
    session = server.open()
    for path in (f"/s/{session['id']}/v1/embeddings", "/nonsense"):
        status, error = server.refused("POST", path, b"{}", session["api_key"])
        assert (status, error["type"]) == (404, "invalid_request_error")
    status, error = server.refused("GET", "/sessions/steno_unknown")
    assert (status, set(error)) == (404, {"type", "message"})


def steno(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "steno"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_version_is_said() -> None:
    done = steno("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{stenograph.__version__}\n", "")


def test_bad_input_is_one_line_and_exit_2(server: Server, tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text("[training]\nstep = 3\n")
    script = write_script(tmp_path / "script.jsonl", {"content": "x", "fautl": "cut"})
    port = server.url.rpartition(":")[2]
    good = write_script(tmp_path / "good.jsonl", {"content": "x"})
    for arguments, named in [
        ((str(config),), "training.step"),
        ((str(tmp_path / "absent.toml"),), "absent.toml"),
        (("--engine", script), "fautl"),
        (("--engine", f"scripted:{tmp_path}/absent.jsonl"), "absent.jsonl"),
        (("--engine", good, "--port", port), "gateway.port"),
        (("--set", "nonsense"), "nonsense"),
    ]:
        done = steno("serve", *arguments)
        assert done.returncode == 2, done
        assert named in done.stderr
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_what_an_option_names_is_a_text_whatever_it_looks_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("123", "true", "'quoted'", "{a = 1}", "a b/c d.db", "q?mode=memory", "h#x%20")
    for name in names:
        with started("--engine", write_script(tmp_path / "1e5", {"content": "x"}), "--store", f"sqlite:{name}"):
            assert (tmp_path / name).is_file()


def test_the_model_is_listed_and_found_by_any_name(server: Server) -> None:
    session = server.open()
    client = server.client(session)
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    with anthropic.Anthropic(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as other:
        assert [listed.id for listed in other.models.list()] == [model.id]
        assert other.models.retrieve("claude-any").id == "claude-any"
