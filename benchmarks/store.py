"""The record's cost by the length of a session: one JSON row a case, a text-keyed trie beside it in the same run."""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from stenograph.traces.memory import MemoryTraceStore
from stenograph.types import Conversation, Message, Reply, Sampling, Turn

NUM_OUTPUT = 200  # tokens of a turn
NUM_CONTEXT = 120
WINDOW = 50  # turns that a figure is the median of


def make_turn(n: int, question: Message) -> Turn:
    rng = np.random.default_rng(n)
    return Turn(
        id=f"turn_{n}",
        context_ids=rng.integers(0, 150_000, NUM_CONTEXT, dtype=np.int32),
        output_ids=rng.integers(0, 150_000, NUM_OUTPUT, dtype=np.int32),
        rollout_logprobs=rng.standard_normal(NUM_OUTPUT, dtype=np.float32),
        versions=((0, 0),),
        finish_reason="stop",
        ended_by="eos",
        sampling=Sampling(),
        logprobs_mode="raw",
        messages=(question,),
        tools=(),
        reply=Reply(f"Answer {n}: " + "word " * 40),
    )


def questions(num_turns: int) -> list[Message]:
    return [Message("user", f"Question {n}: " + "text " * 20) for n in range(num_turns)]


class Session:
    """A session of one branch, grown turn by turn."""

    def __init__(self, num_turns: int) -> None:
        self.store = MemoryTraceStore()
        self.store.open("s", {})
        self.messages: list[Message] = []
        self.parent: str | None = None
        self.commit_us: list[float] = []
        for n, question in enumerate(questions(num_turns)):
            turn = make_turn(n, question)
            start = time.process_time_ns()
            self.store.commit("s", self.parent, turn)
            self.commit_us.append((time.process_time_ns() - start) / 1000)
            self.parent = turn.id
            self.messages += [question, turn.reply.message()]

    def commit_at(self, turn: int) -> float:
        """CPU of a commit around the `turn`th, in microseconds."""
        return float(np.median(self.commit_us[max(0, turn - WINDOW) : turn]))


class NaiveSession:
    """The whole text so far is a key; each look-up walks all of it, character by character in chunks."""

    def __init__(self, num_turns: int) -> None:
        self.children: dict[str, Any] = {}
        self.turn_us: list[float] = []
        text: list[str] = []
        for n, question in enumerate(questions(num_turns)):
            turn = make_turn(n, question)
            text += [question.content, turn.reply.content]
            start = time.process_time_ns()
            key = "".join(text)
            node = self.children
            for at in range(0, len(key), 16):
                node = node.setdefault(key[at : at + 16], {})
            node["ids"] = turn.output_ids.tolist()
            self.turn_us.append((time.process_time_ns() - start) / 1000)

    def turn_at(self, turn: int) -> float:
        return float(np.median(self.turn_us[max(0, turn - WINDOW) : turn]))


def cpu_ms(work: Callable[[], object], times: int) -> float:
    taken = []
    for _ in range(times):
        start = time.process_time_ns()
        work()
        taken.append((time.process_time_ns() - start) / 1e6)
    return float(np.median(taken))


def row(case: str, metric: str, value: float, baseline: str, ratio: float) -> None:
    told = {"bench": "store", "case": case, "metric": metric, "value": round(value, 4), "baseline": baseline}
    print(json.dumps({**told, "ratio": round(ratio, 3)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter sessions")
    quick = parser.parse_args().quick
    length, naive_length = (1600, 400) if quick else (6400, 1600)

    session = Session(length)
    first = session.commit_at(100)
    for turn in (100, 400, 1600, 6400):
        if turn <= length:
            row(
                f"turn_cpu@{turn}",
                "us_per_turn",
                session.commit_at(turn),
                "turn_cpu@100",
                session.commit_at(turn) / first,
            )
    naive = NaiveSession(naive_length)
    for turn in (100, naive_length):
        row(f"naive_turn_cpu@{turn}", "us_per_turn", naive.turn_at(turn), "turn_cpu@100", naive.turn_at(turn) / first)

    tree = session.store.tree("s")
    asked = Conversation((*session.messages, Message("user", "and now?")))
    matched = cpu_ms(lambda: tree.match(asked), 5) * 1000 / len(asked.messages)
    row(f"match@{length}", "us_per_message", matched, "turn_cpu@100", matched / first)

    tracemalloc.start()
    held = Session(length // 4)
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    num_tokens = (length // 4) * (NUM_CONTEXT + NUM_OUTPUT)
    row(
        f"memory@{length // 4}",
        "bytes_per_token",
        num_bytes / num_tokens,
        "ids and log-probabilities",
        num_bytes / num_tokens / 8,
    )
    tracemalloc.stop()
    del held

    num_turns = 131_072 // (NUM_CONTEXT + NUM_OUTPUT)
    branch = Session(num_turns)
    exported = cpu_ms(lambda: branch.store.samples("s"), 9)
    row("export@128k", "ms", exported, "turn_cpu@100", exported * 1000 / first)
    start = time.process_time_ns()
    branch.store.release(["s"])
    released = (time.process_time_ns() - start) / 1e6
    row("release@128k", "ms", released, "turn_cpu@100", released * 1000 / first)


if __name__ == "__main__":
    main()
