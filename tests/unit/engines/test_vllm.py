"""A turn from vLLM's server is exact or an error; whoever stops listening is gone from the server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from pydantic import SecretStr

from stenograph.config import EngineConfig
from stenograph.engines.base import Chunk, Generate
from stenograph.engines.vllm import VllmEngine
from stenograph.engines.vllm_events import Reader, check_echo, read_events
from stenograph.errors import ContextOverflow, EngineError, EngineUnavailable
from stenograph.types import Sampling
from support.listening import rendering
from support.models import Weights, tiny_model
from support.vllm import FakeVllm, fake_vllm

PROMPT = np.array([5, 0, 2**31 - 1, 7], np.int32)
CONTEXT = 200_000


@pytest.fixture(scope="module")
def server() -> Iterator[FakeVllm]:
    with fake_vllm("--max-model-len", str(CONTEXT)) as server:
        yield server


@pytest.fixture
async def engine(server: FakeVllm) -> AsyncIterator[VllmEngine]:
    server.play()
    engine = await VllmEngine.connect(EngineConfig(kind="vllm", url=server.url))
    yield engine
    connector = engine._session.connector
    assert connector is None or not connector._acquired  # no request has kept its connection
    await engine.aclose()
    assert len(asyncio.all_tasks()) == 1


def asked(ids: np.ndarray = PROMPT, **sampling: Any) -> Generate:
    return Generate(ids, Sampling(**sampling), session="s", stop_token_ids=(3, 4))


async def read(engine: VllmEngine, request: Generate | None = None) -> list[Chunk]:
    async with asyncio.timeout(20):
        return [chunk async for chunk in engine.generate(request or asked())]


async def refused(engine: VllmEngine) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await read(engine)
    assert "\n" not in str(caught.value)
    return caught.value


def joined(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [id for chunk in chunks for id in chunk.ids.tolist()], [x for c in chunks for x in c.logprobs.tolist()]


# What is asked


async def test_every_sampling_value_is_said(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": [1]})
    await read(engine)
    (request,) = server.seen()
    assert request["body"] == {
        "model": "tiny",
        "prompt": PROMPT.tolist(),
        "max_tokens": 1024,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [3, 4],
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "stream": True,
    }


async def test_a_seed_and_a_grammar_are_said_where_there_are_any(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": [1]})
    sampling = Sampling(temperature=0.5, top_k=7, min_p=0.1, seed=11, stop=("the gateway's",), constrained=True)
    schema = {"type": "object"}
    await read(engine, Generate(PROMPT, sampling, session="s", grammar=schema))
    body = server.seen()[0]["body"]
    assert (body["temperature"], body["top_k"], body["min_p"], body["seed"]) == (0.5, 7, 0.1, 11)
    assert body["structured_outputs"] == {"json": schema}
    assert "stop" not in body


async def test_output_is_clamped_to_the_context_that_is_left(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": [1]})
    await read(engine, asked(max_tokens=10**9))
    assert server.seen()[0]["body"]["max_tokens"] == CONTEXT - len(PROMPT)


async def test_a_prompt_without_room_is_overflow_by_arithmetic(engine: VllmEngine, server: FakeVllm) -> None:
    with pytest.raises(ContextOverflow) as caught:
        await read(engine, asked(np.zeros(CONTEXT, np.int32)))
    assert (caught.value.num_tokens, caught.value.limit, caught.value.status) == (CONTEXT, CONTEXT, 400)
    assert server.seen() == []
    server.play({"ids": [1, 2]})
    chunks = await read(engine, asked(np.zeros(CONTEXT - 1, np.int32)))
    assert (joined(chunks)[0], chunks[-1].finish_reason) == ([1], "length")


# What comes back


@pytest.mark.parametrize("per_event", [1, 3, 100])
@pytest.mark.parametrize("finish_reason", ["stop", "length", "abort"])
async def test_a_turn_is_what_was_sampled(
    engine: VllmEngine, server: FakeVllm, per_event: int, finish_reason: str
) -> None:
    ids, logprobs = [0, 1, 2**31 - 1, 4, 4, 6, 7], [0.0, -1.5, -9999.0, -0.25, -1, -2.5, -3.5]
    server.play({"ids": ids, "logprobs": logprobs, "finish_reason": finish_reason, "per_event": per_event})
    chunks = await read(engine)
    assert joined(chunks) == (ids, logprobs)
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + [finish_reason]
    assert all(c.ids.dtype == np.int32 and c.logprobs.dtype == np.float32 and c.version == 0 for c in chunks)


async def test_a_turn_may_have_no_tokens(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": []})
    chunks = await read(engine)
    assert joined(chunks) == ([], [])
    assert [c.finish_reason for c in chunks] == ["stop"]


async def test_events_arrive_in_any_pieces(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": [1, 2, 3], "piece": 1})
    assert joined(await read(engine))[0] == [1, 2, 3]


@given(
    texts=st.lists(st.binary(max_size=20).filter(lambda t: not set(t) & set(b"\r\n") and t == t.strip()), max_size=5),
    cuts=st.sets(st.integers(0, 200)),
    end=st.sampled_from([b"\n", b"\r\n"]),
)
def test_events_are_joined_whatever_the_pieces(texts: list[bytes], cuts: set[int], end: bytes) -> None:
    stream = b": comment" + end * 2 + b"".join(b"data: " + text + end + b"event: x" + end * 2 for text in texts)
    at = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]

    async def pieces() -> AsyncIterator[bytes]:
        for a, b in pairwise(at):
            yield stream[a:b]

    async def collect() -> list[bytes]:
        return [data async for events in read_events(pieces()) for data in events]

    assert asyncio.run(collect()) == texts


async def test_a_prompt_of_128k_ids_is_compared_to_the_last(engine: VllmEngine, server: FakeVllm) -> None:
    prompt = np.arange(131_072, dtype=np.int32)
    server.play({"ids": [1, 2]}, {"ids": [1, 2], "echo": "other"})
    assert joined(await read(engine, asked(prompt)))[0] == [1, 2]
    with pytest.raises(EngineError, match="token 131071 is 131072, 131071 was sent"):
        await read(engine, asked(prompt))


async def test_usage_and_comments_are_passed_over(engine: VllmEngine, server: FakeVllm) -> None:
    event = '{"choices":[{"index":0,"token_ids":[9],"logprobs":{"token_logprobs":[-1]},"finish_reason":"stop"}]}'
    server.play({"ids": [1, 2], "fault": "data", "data": ['{"choices":[],"usage":{}}', event]})
    assert joined(await read(engine))[0] == [1, 9]


@pytest.mark.parametrize("fault", ["no_done", "open"])
async def test_a_finished_turn_is_whole_whatever_the_connection_does(
    engine: VllmEngine, server: FakeVllm, fault: str
) -> None:
    server.play({"ids": [1, 2], "fault": fault}, {"ids": [3]})
    assert joined(await read(engine))[0] == [1, 2]
    assert joined(await read(engine))[0] == [3]


@pytest.mark.parametrize(
    "error",
    [
        b'{"error":{"message":"no"}}',
        b'{"error":{"code":1' + b"0" * 30 + b"}}",
        b'{"error":' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"object":"error","message":"\xff"}',
        b'{"choices":[{"index":0,"token_ids":[2],"logprobs":{"token_logprobs":[-1]},"prompt_token_ids":[6]}]}',
    ],
)
def test_what_was_sampled_before_an_error_is_told_before_it(error: bytes) -> None:
    sampled = b'{"choices":[{"index":0,"token_ids":[1],"logprobs":{"token_logprobs":[-1]},"prompt_token_ids":[5]}]}'
    chunks = Reader(b"[5]", np.array([5], np.int32)).read([sampled, error])
    assert next(chunks).ids.tolist() == [1]
    with pytest.raises(EngineError):
        next(chunks)


@pytest.mark.parametrize(("stop", "together"), [((), [[1, 2, 3]]), (("end",), [[1], [2], [3]])])
async def test_events_that_come_together_are_one_chunk_unless_a_stop_string_may_part_them(
    engine: VllmEngine, server: FakeVllm, stop: tuple[str, ...], together: list[list[int]]
) -> None:
    event = '{{"choices":[{{"index":0,"token_ids":[{}],"logprobs":{{"token_logprobs":[-1]}},"prompt_token_ids":{}}}]}}'
    body = "".join(f"data: {event.format(id, PROMPT.tolist())}\n\n" for id in (1, 2, 3))
    server.play({"ids": [], "fault": "status", "status": 200, "body": body})
    async with aclosing(engine.generate(asked(stop=stop))) as chunks:
        assert [(await anext(chunks)).ids.tolist() for _ in together] == together
        with pytest.raises(EngineError, match="ended after 3 tokens"):
            await anext(chunks)


# An echo that is not the prompt


@pytest.mark.parametrize(
    ("echo", "told"),
    [
        ("missing", "did not echo the prompt"),
        ("short", "echoed 3 prompt tokens, 4 were sent"),
        ("other", "token 3 is 8, 7 was sent"),
        ([], "echoed 0 prompt tokens, 4 were sent"),
        ([5, 0, 2**31 - 1, None], "no list of ids"),
        ([5, 0, 2**31 - 1, 7.0], "no list of ids"),
        ([5, [0], 2**31 - 1, 7], "no list of ids"),
        ([[5, 0, 2**31 - 1, 7]], "no list of ids"),
        ([5, 0, 2**31 - 1, 2**32 + 7], "token 3 is 4294967303, 7 was sent"),
        (7, "no list of ids"),
        ("5 0 7", "no list of ids"),
        ({"0": 5}, "no list of ids"),
    ],
)
async def test_a_wrong_echo_is_an_error(engine: VllmEngine, server: FakeVllm, echo: object, told: str) -> None:
    server.play({"ids": [1, 2], "echo": echo})
    assert told in str(await refused(engine))


@pytest.mark.parametrize("echo", [b"[5,0,7]", b"[5, 0, 7]", b"[5,\n 0, 7]", b"[5,0,7 ]"])
def test_an_echo_may_be_written_otherwise(echo: bytes) -> None:
    check_echo(Raw(echo), b"[5,0,7]", np.array([5, 0, 7], np.int32))


@pytest.mark.parametrize("echo", [b"[50,7]", b"[5,0,7,7]", b"[5 0,7]"])
def test_an_echo_that_is_written_otherwise_is_still_compared(echo: bytes) -> None:
    with pytest.raises(EngineError):
        check_echo(Raw(echo), b"[5,0,7]", np.array([5, 0, 7], np.int32))


# Answers that cannot be recorded truly


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"fault": "counts"}, "0 logprobs for 1 tokens"),
        ({"logprobs": [-1, None, -1]}, r"Expected `float`, got `null` .*token_logprobs\[0\]"),
        ({"logprobs": [-1, float("nan"), -1]}, "cannot be read"),
        ({"logprobs": [-1, float("-inf"), -1]}, "cannot be read"),
        ({"logprobs": [-1, -1e300, -1]}, "Expected `float` >= -3.4"),
        ({"logprobs": [-1, "-1", -1]}, "Expected `float`, got `str`"),
        ({"logprobs": [-1, True, -1]}, "Expected `float`, got `bool`"),
        ({"ids": [1, "2", 3]}, r"Expected `int`, got `str` .*token_ids\[0\]"),
        ({"ids": [1, 2.0, 3]}, "Expected `int`, got `float`"),
        ({"ids": [1, True, 3]}, "Expected `int`, got `bool`"),
        ({"ids": [1, -1, 3]}, "Expected `int` >= 0"),
        ({"ids": [1, 2**31, 3]}, "Expected `int` <= 2147483647"),
        ({"ids": [1, None, 3]}, "Expected `int`, got `null`"),
        ({"finish_reason": "error"}, "Invalid enum value 'error' .*finish_reason"),
        ({"finish_reason": 1}, r"Expected `str \| null`, got `int`"),
        ({"fault": "close"}, "ended after 2 tokens without a finish"),
        ({"fault": "data", "data": []}, "ended after 2 tokens without a finish"),
        ({"fault": "cut"}, "cut short"),
        ({"fault": "reset"}, "cut short"),
        ({"fault": "data", "data": ["{"]}, "cannot be read"),
        ({"fault": "data", "data": [""]}, "cannot be read"),
        ({"fault": "data", "data": ["3"]}, "Expected `object`, got `int`.*got 3"),
        ({"fault": "data", "data": ["{}"]}, "without choices: {}"),
        ({"fault": "data", "data": ['{"choices":{}}']}, r"Expected `array \| null`, got `object`"),
        ({"fault": "data", "data": ['{"choices":[3]}']}, "Expected `object`, got `int`"),
        ({"fault": "data", "data": ['{"choices":[{"index":1}]}']}, "Invalid enum value 1 .*index"),
        ({"fault": "data", "data": ['{"choices":[{"index":0},{"index":1}]}']}, "cannot be read"),
        ({"fault": "data", "data": ['{"choices":[{"index":0}]}']}, "missing required field `token_ids`"),
        ({"fault": "data", "data": ['{"choices":[{"index":0,"token_ids":[1]}]}']}, "0 logprobs for 1 tokens"),
        (
            {"fault": "data", "data": ['{"choices":[{"index":0,"token_ids":[1],"logprobs":[]}]}']},
            r"Expected `object \| null`, got `array`",
        ),
        ({"fault": "error"}, "the engine failed: EngineCore encountered an issue"),
        ({"fault": "data", "data": ['{"error":"odd"}']}, "the engine failed: odd"),
        ({"fault": "data", "data": ['{"object":"error","message":"old","code":400}']}, "the engine failed: old"),
        ({"fault": "data", "data": ['{"object":"error","message":"\\ud800"}']}, "cannot be read"),
        ({"fault": "data", "data": [f'{{"error":{"[" * 300 + "]" * 300}}}']}, "the engine failed: "),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_an_unsound_answer_is_an_error(
    engine: VllmEngine, server: FakeVllm, line: dict[str, Any], told: str
) -> None:
    server.play({"ids": [1, 2, 3], **line}, {"ids": [4]})
    with pytest.raises(EngineError, match=told) as caught:
        await read(engine)
    assert "\n" not in str(caught.value)
    assert joined(await read(engine))[0] == [4]


async def test_an_answer_without_any_token_may_be_tried_again(engine: VllmEngine, server: FakeVllm) -> None:
    """What vLLM sends where a request is aborted while it waits."""
    server.play({"ids": [], "fault": "status", "status": 200, "body": "data: [DONE]\n\n"})
    error = await refused(engine)
    assert (type(error), error.retry_after_s) == (EngineUnavailable, 1)


async def test_an_error_in_the_stream_has_the_status_it_would_have_had(engine: VllmEngine, server: FakeVllm) -> None:
    for code, status in [(400, 400), (503, 503), (200, 500), ("x", 500), (None, 500)]:
        event = f'{{"error":{{"message":"no","code":{str(code).lower() if code is None else repr(code)}}}}}'
        server.play({"ids": [1, 2], "fault": "data", "data": [event.replace("'", '"').replace("none", "null")]})
        assert (await refused(engine)).status == status


# Statuses


@pytest.mark.parametrize(
    ("status", "headers", "body", "expected"),
    [
        (400, {}, {"error": {"message": "top_k is\nodd", "code": 400}}, (EngineError, 400, None, "400: top_k is odd")),
        (404, {}, {"object": "error", "message": "no model"}, (EngineError, 404, None, "404: no model")),
        (422, {}, {"detail": [{"msg": "x"}]}, (EngineError, 422, None, '422: [{"msg":"x"}]')),
        (429, {"retry-after": "7"}, {"error": "busy"}, (EngineError, 429, 7.0, "429: busy")),
        (503, {"retry-after": "1.5"}, "", (EngineUnavailable, 503, 1.5, "503: nothing")),
        (503, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, "x", (EngineUnavailable, 503, 0.0, "503: x")),
        (503, {"retry-after": "soon"}, "x", (EngineUnavailable, 503, None, "503: x")),
        (503, {"retry-after": "Wed, 99 Oct 2015 07:28:00 GMT"}, "x", (EngineUnavailable, 503, None, "503: x")),
        (429, {"retry-after": "inf"}, "x", (EngineError, 429, None, "429: x")),
        (500, {}, "<html>oh</html>", (EngineError, 500, None, "500: <html>oh</html>")),
        (502, {}, "", (EngineError, 502, None, "502: nothing")),
        (307, {"location": "http://127.0.0.1:9/"}, "", (EngineError, 502, None, "307: nothing")),
        (204, {}, "", (EngineError, 502, None, "204: nothing")),
    ],
)
async def test_a_status_keeps_its_meaning(
    engine: VllmEngine, server: FakeVllm, status: int, headers: dict[str, str], body: object, expected: tuple
) -> None:
    server.play({"ids": [], "fault": "status", "status": status, "headers": headers, "body": body}, {"ids": [4]})
    error = await refused(engine)
    assert (type(error), error.status, error.retry_after_s) == expected[:3]
    assert str(error) == "the engine answered " + expected[3]
    assert joined(await read(engine))[0] == [4]


async def test_a_time_to_try_again_may_be_a_date(engine: VllmEngine, server: FakeVllm) -> None:
    headers = {"retry-after": format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)}
    server.play({"ids": [], "fault": "status", "status": 503, "headers": headers})
    retry_after_s = (await refused(engine)).retry_after_s
    assert retry_after_s is not None
    assert 80_000 < retry_after_s <= 86_400


async def test_a_long_error_is_cut(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": [], "fault": "status", "status": 400, "body": "x" * 10**6})
    assert len(str(await refused(engine))) < 2000


# Who is not there, and who leaves


async def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, and never listening
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(EngineUnavailable, match="cannot be reached"):
            await VllmEngine.connect(EngineConfig(kind="vllm", url=url))


async def test_a_server_that_dies_is_unavailable() -> None:
    with fake_vllm() as server:
        engine = await VllmEngine.connect(EngineConfig(kind="vllm", url=server.url))
    try:
        assert (await refused(engine)).status == 503
        with pytest.raises(EngineUnavailable):
            await engine.health()
    finally:
        await engine.aclose()


async def test_a_server_that_hangs_can_be_left(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": [1], "fault": "hang"})
    turn = asyncio.create_task(read(engine))
    while not server.seen():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await server.left()


async def test_a_closed_iterator_ends_the_request_on_the_server(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": list(range(100)), "pace_s": 0.05}, {"ids": [1]})
    async with aclosing(engine.generate(asked())) as chunks:
        async for _ in chunks:
            break
    await server.left()
    assert joined(await read(engine))[0] == [1]


async def test_a_cancelled_reader_ends_the_request_on_the_server(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": list(range(100)), "pace_s": 0.05})
    turn = asyncio.create_task(read(engine))
    await asyncio.sleep(0.12)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await server.left()


async def test_a_slow_server_is_waited_for(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": [1, 2], "delay_s": 0.3, "pace_s": 0.1})
    assert joined(await read(engine))[0] == [1, 2]


async def test_a_connection_serves_again(engine: VllmEngine, server: FakeVllm) -> None:
    server.play({"ids": [1], "done_s": 0.01}, loop=True)
    opened = engine._session.connector
    assert opened is not None
    for _ in range(5):
        await read(engine)
        assert len(opened._conns) == 1
        assert sum(map(len, opened._conns.values())) == 1


@pytest.mark.parametrize("line", [{"ids": list(range(100)), "pace_s": 0.05}, {"ids": [1], "fault": "hang"}])
async def test_closing_ends_what_is_in_flight(engine: VllmEngine, server: FakeVllm, line: dict[str, Any]) -> None:
    server.play(line)
    turn = asyncio.create_task(read(engine))
    await asyncio.sleep(0.12)
    await engine.aclose()
    with pytest.raises(EngineError):
        await turn
    await server.left()
    with pytest.raises(EngineUnavailable, match="closed"):
        await read(engine)


# What a server can and cannot


async def test_the_server_says_what_it_serves(server: FakeVllm) -> None:
    for given_length, length in [(None, CONTEXT), (1000, 1000), (CONTEXT + 1, CONTEXT)]:
        config = EngineConfig(
            kind="vllm", url=server.url + "/v1/", context_length=given_length, logprobs_mode="processed"
        )
        engine = await VllmEngine.connect(config)
        await engine.aclose()
        can = engine.capabilities
        assert (engine.server, can.context_length, can.logprobs_mode) == (server.url, length, "processed")
        assert (can.constrained, can.seeded, can.experts, can.live_weights) == (True, True, False, False)


@pytest.mark.parametrize(
    ("options", "constrained"),
    [
        (("--version", "0.10.2"), False),
        (("--version", "0.11.0"), True),
        (("--version", "0.11.0rc1"), True),
        (("--version", "0.9.12"), False),
        (("--version", "0.11"), True),
        (("--version", "1.0.0+cu130"), True),
        (("--version", "0.1.dev1+g29283e8"), False),
        (("--version", "dev"), False),
        (("--version", ""), False),
        (("--without", "/version"), False),
    ],
)
async def test_a_schema_is_kept_to_by_servers_that_know_how_it_is_asked(
    options: tuple[str, ...], constrained: bool
) -> None:
    with fake_vllm(*options) as server:
        engine = await VllmEngine.connect(EngineConfig(kind="vllm", url=server.url))
        await engine.aclose()
    assert engine.capabilities.constrained is constrained


async def test_a_guarded_server_is_given_its_key() -> None:
    with fake_vllm("--api-key", "the-key") as server:
        engine = await VllmEngine.connect(EngineConfig(kind="vllm", url=server.url, api_key=SecretStr("the-key")))
        server.play({"ids": [1, 2]})
        try:
            assert joined(await read(engine))[0] == [1, 2]
        finally:
            await engine.aclose()
        for key in (None, SecretStr("another")):
            with pytest.raises(EngineError, match="STENO_ENGINE__API_KEY") as caught:
                await VllmEngine.connect(EngineConfig(kind="vllm", url=server.url, api_key=key))
            assert caught.value.status == 502  # nothing is wrong with the agent's own key
            assert "another" not in str(caught.value)


async def test_a_server_tells_its_ids(engine: VllmEngine, server: FakeVllm) -> None:
    assert await engine.tokenize("a é!") == [*rendering().encode_text("a é!")]
    (request,) = server.seen("/tokenize")
    assert request["body"] == {"model": "tiny", "prompt": "a é!", "add_special_tokens": False}


async def test_a_server_may_keep_its_ids() -> None:
    with fake_vllm("--without", "/tokenize") as server:
        engine = await VllmEngine.connect(EngineConfig(kind="vllm", url=server.url))
        try:
            assert await engine.tokenize("a") is None
        finally:
            await engine.aclose()


async def test_weights_stay(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match=r'cannot be updated; train with engine\.kind = "local"'):
        await engine.update_weights(Weights(tiny_model()), version=1)


async def test_a_sleeping_server_is_unavailable(engine: VllmEngine) -> None:
    await engine.health()
    await engine.sleep()
    assert await engine.is_paused()
    with pytest.raises(EngineUnavailable):
        await engine.health()
    await engine.wake()
    assert not await engine.is_paused()
    await engine.health()


async def test_pause_says_how_and_what_it_needs(engine: VllmEngine, server: FakeVllm) -> None:
    for mode in ("finish", "abort", "keep"):
        await engine.pause(mode)
        await engine.resume()
    assert [request["query"] for request in server.seen("/pause")] == ["mode=wait", "mode=abort", "mode=keep"]
    engine.server = server.url + "/production"
    with pytest.raises(EngineError, match=r"has no /pause; start vLLM with VLLM_SERVER_DEV_MODE=1"):
        await engine.pause("finish")
    assert not await engine.is_paused()
