"""What the gateway and the trainer rely on, whichever engine serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from stenograph.config import EngineConfig
from stenograph.engines.base import Chunk, Engine, Generate
from stenograph.engines.local import LocalEngine
from stenograph.engines.replay import ReplayEngine
from stenograph.engines.scripted import Line, ScriptedEngine
from stenograph.engines.vllm import VllmEngine
from stenograph.errors import EngineError
from stenograph.traces.session import Opening, SessionRecord
from stenograph.types import Sampling
from support.models import Weights, tiny_model
from support.turns import make_turn
from support.vllm import FakeVllm, fake_vllm

PROMPT = np.arange(20, dtype=np.int32)
LENGTH = 60  # tokens of every answer that nothing cuts short


async def local(request: pytest.FixtureRequest) -> Engine:
    return LocalEngine(tiny_model(), EngineConfig(num_blocks=128, page_size=8, max_batch_tokens=64))


async def scripted(request: pytest.FixtureRequest) -> Engine:
    return ScriptedEngine([Line(np.arange(LENGTH, dtype=np.int32), "length", fault="pace:0.002")] * 40)


async def replay(request: pytest.FixtureRequest) -> Engine:
    record = SessionRecord(Opening("steno_r"))
    record.commit(None, [replace(make_turn(PROMPT.tolist(), range(LENGTH)), finish_reason="length")])
    return ReplayEngine(record, lambda _: None)


async def vllm(request: pytest.FixtureRequest) -> Engine:
    server: FakeVllm = request.getfixturevalue("vllm_server")
    server.play({"ids": list(range(LENGTH)), "finish_reason": "length", "pace_s": 0.002}, loop=True)
    return await VllmEngine.connect(EngineConfig(kind="vllm", url=server.url))


@pytest.fixture(scope="module")
def vllm_server() -> Iterator[FakeVllm]:
    with fake_vllm() as server:
        yield server


@pytest.fixture(params=[local, scripted, replay, vllm], ids=lambda factory: factory.__name__)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    engine = await request.param(request)
    yield engine
    await engine.aclose()


updatable = pytest.mark.parametrize("engine", [local, scripted], indirect=True)  # a vLLM server keeps its weights


def asked(max_tokens: int = LENGTH) -> Generate:
    return Generate(PROMPT, Sampling(max_tokens=max_tokens), session="s")


def ids(chunks: list[Chunk]) -> list[int]:
    return np.concatenate([chunk.ids for chunk in chunks]).tolist()


async def read(engine: Engine, request: Generate) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


async def test_every_id_has_a_logprob_and_only_the_last_chunk_a_finish_reason(engine: Engine) -> None:
    chunks = await read(engine, asked())
    for chunk in chunks:
        assert chunk.ids.dtype == np.int32
        assert chunk.logprobs.dtype == np.float32
        assert len(chunk.ids) == len(chunk.logprobs)
        assert (chunk.logprobs <= 0).all()
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert sum(len(chunk.ids) for chunk in chunks) == LENGTH


async def test_max_tokens_ends_with_length(engine: Engine) -> None:
    chunks = await read(engine, asked(7))
    assert sum(len(chunk.ids) for chunk in chunks) == 7
    assert chunks[-1].finish_reason == "length"


async def test_requests_run_at_once(engine: Engine) -> None:
    turns = await asyncio.gather(*[read(engine, asked(10)) for _ in range(8)])
    assert [sum(len(chunk.ids) for chunk in chunks) for chunks in turns] == [10] * 8


async def test_a_closed_iterator_leaves_the_engine_serving(engine: Engine) -> None:
    async with aclosing(engine.generate(asked())) as chunks:
        async for _ in chunks:
            break
    await engine.pause("finish")  # would wait for a request that went on
    await engine.resume()
    assert await read(engine, asked(3))


async def test_a_paused_engine_starts_nothing(engine: Engine) -> None:
    await engine.pause("finish")
    assert await engine.is_paused()
    turn = asyncio.create_task(read(engine, asked(3)))
    await asyncio.sleep(0.05)
    assert not turn.done()
    await engine.resume()
    assert not await engine.is_paused()
    assert (await turn)[-1].finish_reason == "length"


async def test_pausing_to_finish_lets_requests_end(engine: Engine) -> None:
    turn = asyncio.create_task(read(engine, asked()))
    await asyncio.sleep(0.01)
    await engine.pause("finish")
    assert (await turn)[-1].finish_reason == "length"


async def test_pausing_to_abort_ends_requests_with_what_they_had(engine: Engine) -> None:
    started = asyncio.Event()

    async def watch() -> list[Chunk]:
        chunks = []
        async for chunk in engine.generate(asked()):
            chunks.append(chunk)
            started.set()
        return chunks

    turn = asyncio.create_task(watch())
    await started.wait()
    await engine.pause("abort")
    chunks = await turn
    assert chunks[-1].finish_reason == "abort"
    assert 0 < sum(len(chunk.ids) for chunk in chunks) < LENGTH
    await engine.resume()
    assert (await read(engine, asked(3)))[-1].finish_reason == "length"


@updatable
async def test_pausing_to_keep_freezes_a_request_and_its_version_becomes_a_span(engine: Engine) -> None:
    chunks: list[Chunk] = []
    started = asyncio.Event()

    async def watch() -> None:
        async for chunk in engine.generate(asked()):
            chunks.append(chunk)
            started.set()

    turn = asyncio.create_task(watch())
    await started.wait()
    await engine.pause("keep")
    await asyncio.sleep(0.02)
    frozen = len(chunks)
    await asyncio.sleep(0.05)
    assert len(chunks) == frozen
    await engine.update_weights(Weights(tiny_model()), version=3)
    await engine.resume()
    await turn
    versions = [chunk.version for chunk in chunks if len(chunk.ids)]
    assert set(versions) == {0, 3}
    assert versions == sorted(versions)
    assert sum(len(chunk.ids) for chunk in chunks) == LENGTH


@updatable
async def test_new_weights_have_their_version(engine: Engine) -> None:
    assert {chunk.version for chunk in await read(engine, asked(3))} == {0}
    await engine.update_weights(Weights(tiny_model()), version=5)
    assert {chunk.version for chunk in await read(engine, asked(3))} == {5}


async def test_it_draws_again_what_it_drew_from_a_random_state_on(engine: Engine) -> None:
    await read(engine, asked(3))
    state = await engine.random_state()
    drawn = await read(engine, asked(20))
    if not state:  # nothing is drawn, or nobody knows from what
        return
    other = await read(engine, asked(20))
    await engine.restore_random_state(state)
    again = await read(engine, asked(20))
    assert ids(again) == ids(drawn) != ids(other)


async def test_a_random_state_of_another_kind_of_engine_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineError, match="random state"):
        await engine.restore_random_state(b"another's")
    assert await read(engine, asked(3))


async def test_it_sleeps_and_wakes(engine: Engine) -> None:
    await engine.sleep()
    await engine.wake()
    await engine.health()
    assert await read(engine, asked(3))


async def test_closing_twice_is_closing(engine: Engine) -> None:
    await engine.aclose()
    await engine.aclose()
