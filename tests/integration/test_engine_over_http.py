"""`steno serve` before an engine's own server: turns are recorded, the rest passes, and who may ask for what."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import pytest

from stenograph.rendering import builtin_tokenizer
from support.listening import rendering
from support.serving import Server, serving
from support.vllm import FakeVllm, fake_vllm

RENDERING = rendering()
SAID = [int(id) for id in RENDERING.encode_text("Hello there.<|im_end|>")]
ASK = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeVllm]:
    with fake_vllm() as engine:
        yield engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the tokenizer that the engine has, and no weights."""
    folder = tmp_path_factory.mktemp("model")
    builtin_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def server(engine: FakeVllm, model: str) -> Iterator[Server]:
    named = ("--engine", f"vllm:{engine.url}", "--model", model, "--set", "model.renderer=qwen3")
    with serving(*named, "--set", "gateway.on_disconnect=abort") as server:
        yield server


def ask(server: Server, session: Mapping[str, Any], **fields: Any) -> Any:
    return server.call("POST", f"/s/{session['id']}/v1/chat/completions", {**ASK, **fields}, session["api_key"])


def test_turns_are_sampled_there_and_recorded_here(server: Server, engine: FakeVllm) -> None:
    engine.play({"ids": SAID}, {"ids": SAID})
    session = server.open()
    answer = ask(server, session, max_tokens=100_000, seed=7)
    said = answer["choices"][0]["message"]
    assert said["content"] == "Hello there."
    follow_up = [*ASK["messages"], said, {"role": "user", "content": "again"}]
    ask(server, session, messages=follow_up)
    server.call("POST", f"/sessions/{session['id']}/seal", {"reward": 1.0})
    (sample,) = server.call("GET", f"/sessions/{session['id']}/samples")
    assert server.call("GET", f"/sessions/{session['id']}/drift") == []
    first, second = engine.seen()
    assert second["body"]["prompt"] == sample["ids"][: -len(SAID)]
    assert second["body"]["prompt"][: len(first["body"]["prompt"]) + len(SAID)] == first["body"]["prompt"] + SAID
    assert (first["body"]["seed"], first["body"]["temperature"], first["body"]["top_p"]) == (7, 1.0, 1.0)
    (turn, _) = server.call("GET", f"/sessions/{session['id']}/tree")["turns"]
    assert turn["notes"] == ["clamped:max_tokens"]  # the seed is the engine's to keep


def test_another_prompt_than_was_sent_is_never_a_turn(server: Server, engine: FakeVllm) -> None:
    engine.play({"ids": SAID, "echo": "other"})
    session = server.open()
    body = json.dumps(ASK).encode()
    status, error = server.refused("POST", f"/s/{session['id']}/v1/chat/completions", body, session["api_key"])
    assert (status, "echoed another prompt" in error["message"]) == (502, True)
    assert server.call("GET", f"/sessions/{session['id']}/tree")["turns"] == []


def test_a_schema_constrains_the_engine_and_masks_the_turn(server: Server, engine: FakeVllm) -> None:
    engine.play({"ids": SAID})
    session = server.open()
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    ask(server, session, response_format=wanted)
    (seen,) = engine.seen()
    assert seen["body"]["structured_outputs"] == {"json": SCHEMA}
    ledger = server.call("GET", f"/sessions/{session['id']}/ledger")
    assert ledger["masked"] == {"constrained": len(SAID)}


def test_a_busy_engine_is_busy_here_too(server: Server, engine: FakeVllm) -> None:
    session = server.open()
    body = json.dumps(ASK).encode()
    for status in (429, 503):
        engine.play({"ids": [], "fault": "status", "status": status, "headers": {"Retry-After": "3"}, "body": "busy"})
        told, error = server.refused("POST", f"/s/{session['id']}/v1/chat/completions", body, session["api_key"])
        assert (told, "busy" in error["message"]) == (status, True)
    engine.play({"ids": [], "fault": "status", "status": 422, "body": {"error": {"message": "no such thing"}}})
    told, error = server.refused("POST", f"/s/{session['id']}/v1/chat/completions", body, session["api_key"])
    assert (told, "no such thing" in error["message"]) == (422, True)


def test_a_client_that_leaves_aborts_on_the_engine(server: Server, engine: FakeVllm) -> None:
    engine.play({"ids": SAID, "pace_s": 0.05})
    session = server.open()
    url, body = urlsplit(session["base_url"]), json.dumps({**ASK, "stream": True}).encode()
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = f"POST {url.path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {session['api_key']}\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        connection.recv(100)
    deadline = time.monotonic() + 20
    while [request["end"] for request in engine.seen()] != ["left"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ledger = server.call("GET", f"/sessions/{session['id']}/ledger")
    assert ledger["dropped"] == ({"aborted": ledger["sampled"]} if ledger["sampled"] else {})


# --- what passes ---------------------------------------------------------------------------------------------------


def test_auxiliary_requests_pass_less_our_session(server: Server, engine: FakeVllm) -> None:
    engine.play()
    session = server.open()
    body = b'{"prompt": "abc",  "session_id": "%s"}' % session["id"].encode()
    _, answer = server.raw("POST", "/tokenize?x=1", body, session["api_key"])
    assert json.loads(answer)["tokens"] == [*RENDERING.encode_text("abc")]
    (seen,) = engine.seen("/tokenize")
    assert (seen["body"], seen["query"]) == ({"prompt": "abc"}, "x=1")
    assert not {"authorization", "x-api-key"} & set(seen["headers"])
    server.raw("POST", f"/s/{session['id']}/tokenize", b'{"prompt": "abc", "session_id": "mine"}', session["api_key"])
    assert engine.seen("/tokenize")[1]["body"]["session_id"] == "mine"


def test_a_sessions_key_reaches_no_control_and_samples_nothing_unrecorded(server: Server, engine: FakeVllm) -> None:
    engine.play({"ids": SAID})
    session = server.open()
    completion = json.dumps({"prompt": [1, 2], "stream": True, "max_tokens": 5}).encode()
    for path, expected in [
        ("/v1/completions", 501),
        ("/v1/./completions", 501),
        ("//v1/%63ompletions", 501),
        ("/v1/load_lora_adapter", 403),
        ("/pause", 404),
        ("/health/../sleep", 404),
    ]:
        for prefix in ("", f"/s/{session['id']}"):
            status, error = server.refused("POST", prefix + path, completion, session["api_key"])
            assert (status, bool(error["message"])) == (expected, True), path
    assert engine.seen() == engine.seen("/v1/load_lora_adapter") == engine.seen("/pause") == []
    untraced = server.open(traced=False)
    assert server.raw("POST", "/v1/completions", completion, untraced["api_key"])[0] == 200
    assert server.raw("POST", "/v1/load_lora_adapter", b"{}")[0] == 200
    assert server.raw("GET", "/version", None)[0] == 200


def test_what_samples_untraced_takes_the_same_way(server: Server, engine: FakeVllm) -> None:
    engine.play({"ids": SAID}, {"ids": SAID}, {"ids": SAID})
    untraced, traced = server.open(traced=False), server.open()
    without = server.call("POST", "/v1/chat/completions", ASK)
    for session in (untraced, traced):
        assert ask(server, session)["choices"][0]["message"] == without["choices"][0]["message"]
    bodies = [request["body"] for request in engine.seen()]
    assert bodies[0] == bodies[1] == bodies[2]


def test_ids_are_shown_where_they_are_asked_for(server: Server, engine: FakeVllm) -> None:
    engine.play({"ids": SAID}, {"ids": SAID})
    session = server.open()
    answer = ask(server, session, return_token_ids=True, logprobs=True)
    assert answer["choices"][0]["token_ids"] == SAID
    assert answer["prompt_token_ids"] == engine.seen()[0]["body"]["prompt"]
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(SAID)
    assert "prompt_token_ids" not in ask(server, session)


def test_an_engine_paused_by_its_owner_is_waited_for_and_then_busy(engine: FakeVllm, model: str) -> None:
    arguments = ("--engine", f"vllm:{engine.url}", "--model", model, "--set", "model.renderer=qwen3")
    with serving(*arguments, "--set", "gateway.idle_timeout_s=0.5") as server:
        engine.play({"ids": SAID})
        session = server.open()
        server.raw("POST", "/pause?mode=keep", b"")
        body = json.dumps(ASK).encode()
        status, error = server.refused("POST", f"/s/{session['id']}/v1/chat/completions", body, session["api_key"])
        assert (status, "paused" in error["message"]) == (429, True)
        server.raw("POST", "/resume", b"")
        assert ask(server, session)["choices"][0]["message"]["content"] == "Hello there."
