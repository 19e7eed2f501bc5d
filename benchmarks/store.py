"""The record's cost by the length and the shape of a session, a naive trie of texts beside it: one JSON row a case."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from stenograph.dialects import chat
from stenograph.dialects.seen import Seen
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.session import Opening
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.traces.store import TraceStore
from stenograph.types import Conversation, Ids, Message, Reply, Sampling, Turn

NUM_CONTEXT = 120  # tokens of a turn
NUM_OUTPUT = 200
LONG = 131_072 // (NUM_CONTEXT + NUM_OUTPUT)  # turns of a branch of 128k tokens
WINDOW = 50  # turns that a figure is the median of
NUM_BRANCHES = 64  # from one node
NUM_AGENTS = 30  # under one system prompt
NUM_SYSTEM = 20_000  # tokens of it
NO_IDS: Ids = np.empty(0, np.int32)


def make_turn(
    n: int, num_output: int = NUM_OUTPUT, told: tuple[Message, ...] = (), told_ids: Ids = NO_IDS, policy: int = 0
) -> Turn:
    """A question and its answer, after what the agent was `told`. As in a gateway, turns have no object in common."""
    rng = np.random.default_rng(n)
    asked = rng.integers(0, 150_000, NUM_CONTEXT, dtype=np.int32)
    return Turn(
        id=f"turn_{n:016x}",
        context_ids=np.concatenate([told_ids, asked]),
        output_ids=rng.integers(0, 150_000, num_output, dtype=np.int32),
        rollout_logprobs=rng.standard_normal(num_output, dtype=np.float32),
        versions=((0, policy),),
        finish_reason="stop",
        ended_by="eos",
        sampling=Sampling(),
        logprobs_mode="raw",
        messages=(*told, Message("user", f"Question {n}: " + "text " * 20)),
        tools=(),
        reply=Reply(f"Answer {n}: " + "word " * (num_output // 5 - 8), f"Reasoning {n}: " + "word " * 5),
        started_s=1e9 + n,
        seconds=0.5 + n,
    )


class NaiveTrie:
    """One branch by the text so far: each look-up walks all of it, 16 characters a step; tokens lie in lists."""

    def __init__(self) -> None:
        self.root: dict[Any, Any] = {}
        self.texts: list[str] = []

    def commit(self, turn: Turn) -> None:
        self.texts += [turn.messages[-1].content, turn.reply.content]
        node = self.root
        for chunk in _chunks(self.texts):
            node = node.setdefault(chunk, {})
        ids = np.concatenate([turn.context_ids, turn.output_ids])
        node[None] = ids.tolist(), turn.rollout_logprobs.tolist()

    def match(self, messages: Iterable[Message]) -> dict[Any, Any]:
        node = self.root
        for chunk in _chunks(message.content for message in messages):
            node = node.get(chunk, {})
        return node

    def export(self) -> tuple[Ids, np.ndarray]:
        ids, logprobs = [], []
        node = self.root
        for chunk in _chunks(self.texts):
            node = node[chunk]
            if None in node:
                ids += node[None][0]
                logprobs += node[None][1]
        return np.array(ids, np.int32), np.array(logprobs, np.float32)


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    return (text[at : at + 16] for text in texts for at in range(0, len(text), 16))


# --- what is measured ----------------------------------------------------------------------------------------------


def new_store() -> MemoryTraceStore:
    store = MemoryTraceStore()
    store.open(Opening("s"))
    return store


def grow(store: TraceStore, num_turns: int, num_output: int = NUM_OUTPUT, marked: bool = False) -> list[float]:
    """Commit one branch; the CPU of each commit, and where it is `marked` of saying that it was delivered."""
    parent: str | None = None
    taken = []
    for n in range(num_turns):
        turn = make_turn(n, num_output, policy=n // 8)
        taken.append(commit_us(store, parent, turn))
        if marked:
            taken[-1] += cpu_us(lambda turn=turn: store.mark("s", [turn.id], "delivered"))
        parent = turn.id
    return taken


def commit_us(store: TraceStore, parent: str | None, turn: Turn) -> float:
    return cpu_us(lambda: store.commit("s", parent, turn))


def grown(num_turns: int, num_output: int = NUM_OUTPUT) -> MemoryTraceStore:
    store = new_store()
    grow(store, num_turns, num_output)
    return store


def grow_naive(trie: NaiveTrie, num_turns: int, num_output: int = NUM_OUTPUT) -> list[float]:
    taken = []
    for n in range(num_turns):
        turn = make_turn(n, num_output)
        taken.append(cpu_us(lambda turn=turn: trie.commit(turn)))
    return taken


def naive_grown(num_turns: int, num_output: int = NUM_OUTPUT) -> NaiveTrie:
    trie = NaiveTrie()
    grow_naive(trie, num_turns, num_output)
    return trie


def fork_us() -> tuple[float, float]:
    """A commit as one of the last of many branches from one node, and one as the only branch."""
    forked, alone = [], []
    for _ in range(5):
        store = new_store()
        alone += grow(store, 2 * WINDOW)[WINDOW:]
        parent = store.tree("s").leaves()[0]
        taken = [commit_us(store, parent, make_turn(1000 + n)) for n in range(NUM_BRANCHES)]
        forked += taken[-NUM_BRANCHES // 4 :]
    return float(np.median(forked)), float(np.median(alone))


def agents(apart: bool) -> list[MemoryTraceStore]:
    """Sub-agents that begin with one system prompt, in one session or in one each."""
    stores = [new_store() for _ in range(NUM_AGENTS if apart else 1)]
    for n in range(NUM_AGENTS):
        system = Message("system", "Be brief. " * (NUM_SYSTEM // 3))  # each request brings its own
        turn = make_turn(n, told=(system,), told_ids=np.arange(NUM_SYSTEM, dtype=np.int32))
        stores[n % len(stores)].commit("s", None, turn)
    return stores


def cpu_us(work: Callable[[], object], times: int = 1) -> float:
    """CPU of the whole process, the least of `times`: a busy machine only ever adds to it."""
    taken = []
    for _ in range(times):
        start = time.process_time_ns()
        work()
        taken.append((time.process_time_ns() - start) / 1000)
    return min(taken)


def held_bytes(build: Callable[[], object]) -> int:
    gc.collect()  # empties the free lists too, from which objects would come uncounted
    tracemalloc.start()
    kept = build()
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return num_bytes


# --- rows ----------------------------------------------------------------------------------------------------------


def row(case: str, metric: str, value: float, baseline: str, baseline_value: float) -> None:
    told = {"bench": "store", "case": case, "metric": metric, "value": round(value, 4), "baseline": baseline}
    print(json.dumps(told | {"ratio": round(value / baseline_value, 3)}), flush=True)


def turn_rows(length: int, naive_length: int) -> None:
    """CPU of a commit around the nth turn, of three sessions the least."""
    ours = np.min([grow(new_store(), length) for _ in range(3)], axis=0)
    naive = grow_naive(NaiveTrie(), naive_length)
    first = float(np.median(ours[100 - WINDOW : 100]))
    for case, taken, last in (("turn_cpu", ours, length), ("naive_turn_cpu", naive, naive_length)):
        for turn in (100, 400, 1600, 6400):
            if turn <= last:
                value = float(np.median(taken[turn - WINDOW : turn]))
                row(f"{case}@{turn}", "us_per_turn", value, "turn_cpu@100", first)


def journal_rows(length: int) -> None:
    """CPU of a commit and its mark that a journal takes beside what memory does; and of reading a branch back."""
    with tempfile.TemporaryDirectory() as folder, closing(SqliteTraceStore(Path(folder) / "traces.db")) as journal:
        journal.open(Opening("s"))
        written, kept = grow(journal, length, marked=True), grow(new_store(), length, marked=True)
        for turn in (100, 400, 1600, 6400):
            if turn <= length:
                value, beside = (float(np.median(taken[turn - WINDOW : turn])) for taken in (written, kept))
                row(f"journal_turn_cpu@{turn}", "us_per_turn", value, "memory", beside)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "traces.db"
        with closing(SqliteTraceStore(path)) as journal:
            journal.open(Opening("s"))
            grow(journal, LONG)
        num_bytes = path.stat().st_size / (LONG * (NUM_CONTEXT + NUM_OUTPUT))
        row("journal_file@128k", "bytes_per_token", num_bytes, "ids and log-probabilities", 4 + 4 * NUM_OUTPUT / 320)
        with closing(SqliteTraceStore(path)) as journal:
            read = cpu_us(lambda: journal.tree("s"))
    row("journal_load@128k", "ms", read / 1000, "committing it", sum(written[:LONG]) / 1000)


def match_rows(length: int, naive_length: int) -> None:
    """A conversation found again; the naive trie finds a shorter one.

    As requests repeat it: its messages are known by their bytes, and so are their digests. New: they are not. Changed:
    its client leaves out all reasoning, as it has done before. Read: from a request's body on.
    """
    store, trie = grown(length), naive_grown(naive_length)
    tree = store.tree("s")
    said = (*tree.said(tree.leaves()[0]), Message("user", "and now?"))
    changed = tuple(replace(message, reasoning="") for message in said)
    naive = cpu_us(lambda: trie.match(said[: 2 * naive_length]), 5) / (2 * naive_length)
    seen, body = Seen(), body_of(changed)

    def match(messages: tuple[Message, ...], copied: bool = False) -> None:
        found = store.match("s", Conversation(tuple(replace(one) for one in messages) if copied else messages))
        assert found is not None
        assert found.num_known == len(said) - 1

    copying = cpu_us(lambda: [replace(one) for one in said], 9)
    for case, work, less in (
        ("match", lambda: match(said), 0.0),
        ("match_new", lambda: match(said, copied=True), copying),
        ("match_changed", lambda: match(changed), 0.0),
        ("match_read", lambda: match(chat.parse_request(body, seen).conversation.messages), 0.0),
    ):
        work()
        row(f"{case}@{length}", "us_per_message", (cpu_us(work, 9) - less) / len(said), "naive trie", naive)


def body_of(messages: Iterable[Message]) -> bytes:
    return orjson.dumps({"messages": [{"role": one.role, "content": one.content} for one in messages]})


def memory_rows(num_turns: int) -> None:
    """Everything that a session holds, texts and records included. The floor of a sampled token is 8 bytes."""
    for kind, turns, num_output in (
        ("memory", num_turns, NUM_OUTPUT),
        ("memory_short", num_turns, NUM_OUTPUT // 10),
        ("memory_long", num_turns // 4, NUM_OUTPUT * 10),
    ):
        num_tokens = turns * (NUM_CONTEXT + num_output)
        ours = held_bytes(lambda turns=turns, num_output=num_output: grown(turns, num_output))
        naive = held_bytes(lambda turns=turns, num_output=num_output: naive_grown(turns, num_output))
        row(f"{kind}@{turns}", "bytes_per_token", ours / num_tokens, "naive trie", naive / num_tokens)
        told = sum(text_bytes(make_turn(n, num_output)) for n in range(turns))
        row(
            f"{kind}_less_texts@{turns}",
            "bytes_per_token",
            (ours - told) / num_tokens,
            "naive trie",
            naive / num_tokens,
        )


def text_bytes(turn: Turn) -> int:
    """What the texts of a turn take, which no record can do without."""
    texts = (turn.messages[-1].content, turn.reply.content, turn.reply.reasoning)
    return sum(map(sys.getsizeof, texts))


def shape_rows() -> None:
    forked, alone = fork_us()
    row(f"fork@{NUM_BRANCHES}", "us_per_turn", forked, "one branch", alone)
    shared, apart = (held_bytes(lambda apart=apart: agents(apart)) / NUM_AGENTS for apart in (False, True))
    row(f"system_prompt_shared@{NUM_AGENTS}", "bytes_per_branch", shared, "a session each", apart)


def branch_rows() -> None:
    stores, tries = [grown(LONG) for _ in range(3)], [naive_grown(LONG) for _ in range(3)]
    exported = cpu_us(lambda: stores[0].samples("s"), 9), cpu_us(tries[0].export, 9)
    row("export@128k", "ms", exported[0] / 1000, "naive trie", exported[1] / 1000)
    released = (
        min(cpu_us(partial(store.release, ["s"])) for store in stores),
        min(cpu_us(trie.root.clear) for trie in tries),
    )
    row("release@128k", "ms", released[0] / 1000, "naive trie", released[1] / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter sessions")
    length, naive_length = (1600, 400) if parser.parse_args().quick else (6400, 1600)
    turn_rows(length, naive_length)
    journal_rows(length)
    match_rows(length, naive_length)
    memory_rows(naive_length)
    shape_rows()
    branch_rows()


if __name__ == "__main__":
    main()
