"""A recorded prompt gets its recorded answer, by its recorded name; another one is refused and told of."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from stenograph.engines.base import Chunk, Generate
from stenograph.engines.replay import ReplayEngine
from stenograph.errors import RequestError
from stenograph.traces.drift import Drift
from stenograph.traces.session import Opening, SessionRecord
from stenograph.types import Sampling, Turn
from support.turns import asking, make_turn, user

PROMPT = [1, 2, 3]


def turn(output: Sequence[int], started_s: float = 0.0, name: str = "", **fields: object) -> Turn:
    made = make_turn(PROMPT, output, asked=(user("hello"),), said=f"{list(output)}")
    return replace(made, started_s=started_s, id=f"turn_{name}" if name else made.id, **fields)


def engine(*turns: Turn, differs: list[Drift] | None = None) -> ReplayEngine:
    record = SessionRecord(Opening("steno_r"))
    for turn in turns:
        record.commit(None, [turn])
    return ReplayEngine(record, [].append if differs is None else differs.append)


async def chunks(engine: ReplayEngine, max_tokens: int = 99, session: str = "s", turn: str = "") -> list[Chunk]:
    prompt = np.array(PROMPT, np.int32)
    request = Generate(prompt, Sampling(max_tokens=max_tokens), session, turn, conversation=asking("hello"))
    return [chunk async for chunk in engine.generate(request)]


async def said(engine: ReplayEngine, session: str = "s", turn: str = "") -> list[int]:
    return np.concatenate([chunk.ids for chunk in await chunks(engine, session=session, turn=turn)]).tolist()


async def test_a_recorded_prompt_gets_what_was_sampled() -> None:
    recorded = turn(range(48), versions=((0, 3), (20, 4)), finish_reason="length")
    got = await chunks(engine(recorded))
    np.testing.assert_array_equal(np.concatenate([one.logprobs for one in got]), recorded.rollout_logprobs)
    assert [version for one in got for version in [one.version] * len(one.ids)] == [3] * 20 + [4] * 28
    assert [one.finish_reason for one in got] == [None] * (len(got) - 1) + ["length"]
    assert len(got) > 2  # so that a stream has pieces
    assert np.concatenate([one.ids for one in got]).tolist() == list(range(48))


async def test_a_turn_of_no_tokens_is_one() -> None:
    [chunk] = await chunks(engine(turn([])))
    assert (len(chunk.ids), chunk.finish_reason) == (0, "stop")


async def test_equal_prompts_are_answered_in_the_order_they_were_asked_in_and_the_last_again() -> None:
    replay = engine(turn([7], started_s=2.0), turn([8], started_s=1.0))
    assert [await said(replay) for _ in range(3)] == [[8], [7], [7]]
    assert (len(replay.replayed), replay.num_repeated) == (2, 1)


async def test_each_session_is_given_all_of_the_record() -> None:
    replay = engine(turn([7]), turn([8]))
    assert [await said(replay, session=name) for name in "abab"] == [[7], [7], [8], [8]]
    assert replay.num_repeated == 0


async def test_fewer_tokens_than_recorded_are_the_beginning() -> None:
    replay = engine(turn(range(48)))
    got = await chunks(replay, max_tokens=20)
    assert (sum(len(one.ids) for one in got), got[-1].finish_reason, replay.num_cut) == (20, "length", 1)
    assert (await chunks(replay, max_tokens=48))[-1].finish_reason == "stop"
    assert replay.num_cut == 1


async def test_what_a_stop_string_ended_comes_in_one_piece() -> None:
    """What ends a turn where the string is whole would leave the tokens out that came with it."""
    assert len(await chunks(engine(turn(range(48), stopped_by=".")))) == 1


async def test_turns_have_their_recorded_names_and_are_given_by_them() -> None:
    replay = engine(turn([7], name="a"), turn([8], name="a_1"), turn([9], name="b"))
    prompt = np.array(PROMPT, np.int32)
    assert replay.names("s", prompt, ["x", "x_1"]) == ["a", "a_1"]
    assert replay.names("s", prompt, ["y"]) == ["b"]
    assert replay.names("s", prompt, ["z"]) == ["z"]  # given again, and one session has a name once
    assert replay.names("s", np.array([5], np.int32), ["z"]) == ["z"]
    names = ["turn_z", "turn_b", "turn_a_1", "turn_a"]  # in whatever order their samples are begun
    assert [await said(replay, turn=name) for name in names] == [[9], [9], [8], [7]]


async def test_another_prompt_is_refused_and_told_of() -> None:
    differs: list[Drift] = []
    replay = engine(turn([7]), differs=differs)
    request = Generate(np.array([1, 2, 4], np.int32), Sampling(), "s", conversation=asking("hellO"))
    with pytest.raises(RequestError, match=r"message 0 \(user\), content, character 4: 'o' is recorded, 'O' came") as e:
        await anext(replay.generate(request))
    assert not e.value.retry
    [drift] = differs
    assert (drift.cause, drift.message, drift.char, drift.token) == ("message_changed", 0, 4, 2)
    assert replay.replayed == set()


async def test_what_differs_is_compared_with_the_first_that_was_not_asked_for_yet() -> None:
    differs: list[Drift] = []
    turns = [make_turn([n], [7], asked=(user(text),)) for n, text in enumerate(["one", "two", "three"])]
    replay = engine(*turns, differs=differs)
    for prompt in ([0], [9]):
        request = Generate(np.array(prompt, np.int32), Sampling(), "s", conversation=asking("another"))
        with suppress(RequestError):
            assert [chunk async for chunk in replay.generate(request)]
    [drift] = differs
    assert (drift.turn, drift.before) == (turns[1].id, "two")


async def test_an_empty_record_has_nothing_alike() -> None:
    with pytest.raises(RequestError, match="nothing there is like it"):
        await chunks(engine())


def test_what_engines_cannot_do_by_themselves_was_recorded() -> None:
    constrained = turn([7], sampling=Sampling(constrained=True), logprobs_mode="processed")
    assert engine(constrained).capabilities.constrained
    assert engine(constrained).capabilities.logprobs_mode == "processed"
    assert not engine(turn([7])).capabilities.constrained
