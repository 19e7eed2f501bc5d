"""Whether the gateway endures: streams that are all open at the same time, sessions that come and go, and no growth.

Gateway and engine are a process each; the load is this one, which looks at the gateway's memory and CPU meanwhile. One
JSON row a figure, what it is compared with beside it; what went wrong is told on stderr. Two cases:

`streams`: sessions that stream one turn each, all at once, for as long as the engine takes for it; then all are
released, and the same once more in the same process.
`turns`: agents that take a turn every ten seconds, played six times as fast: an hour in ten minutes. A session has 40
turns and 8k tokens at its end; then it is sealed and released, and its agent opens another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import aiohttp
import orjson
import uvloop
from load import END, Client, Plan, Refused, Target, address, admin, cpu_of, opened
from parts import Parts, fake_engine, memory_mb, percentiles, reply_ids, write_tokenizer

NUM_PER_EVENT = 8  # tokens, as the fake engine has it
NUM_AGENTS = 32
TURN_S = 10.0 / 6  # between an agent's turns
NUM_REPLY = 60  # tokens, of a turn
NUM_ASKING = 16  # requests about the record at the same time
SETTLE_S = 5.0  # after a release: the gateway's idle connections to the engine close meanwhile
MB = 2**20

T = TypeVar("T")


def row(case: str, metric: str, value: float, beside: str | None = None, ratio: float | None = None) -> None:
    told = {"bench": "endurance", "case": case, "metric": metric, "value": round(value, 3)}
    print(json.dumps(told | {"baseline": beside, "ratio": None if ratio is None else round(ratio, 3)}), flush=True)


def compared(case: str, metric: str, values: tuple[float, float], what: str) -> None:
    """A row for the last of two values that should be the same; `what` is the first one."""
    first, last = values
    row(case, metric, last, f"{what} {first:.3f}", last / first)


def counted(errors: list[str]) -> int:
    """How many there are; the first of them are said on stderr."""
    for error in errors[:5]:
        print(error, file=sys.stderr)
    return len(errors)


# --- the record ----------------------------------------------------------------------------------------------------


async def each(work: Callable[[dict[str, str]], Awaitable[T]], sessions: Iterable[dict[str, str]]) -> list[T]:
    """In order, a few at the same time."""
    free = asyncio.Semaphore(NUM_ASKING)

    async def one(session: dict[str, str]) -> T:
        async with free:
            return await work(session)

    return await asyncio.gather(*[one(session) for session in sessions])


def connected() -> aiohttp.ClientSession:
    """Clients whose connections close with it."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=2**20)


async def faults(
    http: aiohttp.ClientSession, target: Target, session: dict[str, str], want: tuple[int, int]
) -> list[str]:
    """What the record of a session lacks; `want` are its turns and the tokens sampled in each."""
    num_turns, num_tokens = want
    info = await admin(http, target, "GET", f"/sessions/{session['id']}")
    ledger = await admin(http, target, "GET", f"/sessions/{session['id']}/ledger")
    found = []
    if info["num_turns"] != num_turns:
        found.append(f"{info['num_turns']} turns are recorded, {num_turns} were taken")
    ended = ledger["trained"] + sum(ledger["masked"].values()) + sum(ledger["dropped"].values())
    if not ended + ledger["in_flight"] == ledger["sampled"] == num_turns * num_tokens:
        found.append(f"{num_turns} turns of {num_tokens} tokens were taken, the ledger has {ledger}")
    return found


async def release(http: aiohttp.ClientSession, target: Target, sessions: Iterable[dict[str, str]]) -> None:
    await each(lambda session: admin(http, target, "DELETE", f"/sessions/{session['id']}"), sessions)
    await asyncio.sleep(SETTLE_S)


# --- streams -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Heard:
    """One stream, as its client heard it."""

    num_events: int = 0
    first_s: float = 0.0  # from the request to the first event
    longest_pause_s: float = 0.0  # between two events
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """The gateway, so long after the streams were asked for."""

    seconds: float
    rss_mb: float
    cpu_s: float
    num_events: int


@dataclass(frozen=True, slots=True)
class Held:
    """All streams of one time."""

    heard: list[Heard]
    moments: list[Moment]
    errors: list[str]
    released_mb: float
    peak_mb: float

    def at(self, share: float) -> Moment:
        """The moment when that share of the time had passed that a stream took."""
        seconds = share * median(one.seconds for one in self.heard)
        return min(self.moments, key=lambda moment: abs(moment.seconds - seconds))


async def hear(http: aiohttp.ClientSession, session: dict[str, str], text: str, heard: Heard) -> None:
    """Ask for one stream and count its events as they come; only its end is looked at."""
    url, headers = address(session)
    body = orjson.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]})
    tail = b""
    began_s = last_s = time.perf_counter()
    try:
        async with http.post(url, data=body, headers=headers) as answer:
            while data := await answer.content.readany():
                tail = (tail + data)[-max(len(END), 200) :]
                num_events = data.count(b"data: ")
                if not num_events:  # a comment that keeps the connection alive
                    continue
                now_s = time.perf_counter()
                if heard.num_events:
                    heard.longest_pause_s = max(heard.longest_pause_s, now_s - last_s)
                else:
                    heard.first_s = now_s - began_s
                heard.num_events, last_s = heard.num_events + num_events, now_s
        if answer.status != 200 or not tail.endswith(END):
            heard.error = f"a stream ended without its end, status {answer.status}: ...{tail!r}"
    except (aiohttp.ClientError, TimeoutError, OSError) as e:
        heard.error = f"a stream broke: {type(e).__name__}: {e}"
    heard.seconds = time.perf_counter() - began_s


async def watch(target: Target, heard: list[Heard], moments: list[Moment]) -> None:
    began_s = time.perf_counter()
    while True:
        num_events = sum(one.num_events for one in heard)
        seconds = time.perf_counter() - began_s
        moments.append(Moment(seconds, memory_mb(target.pid, "VmRSS"), cpu_of(target.pid), num_events))
        await asyncio.sleep(0.25)


async def hold(http: aiohttp.ClientSession, target: Target, num_streams: int, num_tokens: int) -> Held:
    """Open the sessions, stream in all of them at once, look into the record, release them."""
    sessions = [await opened(http, target, 0) for _ in range(num_streams)]
    heard, moments = [Heard() for _ in sessions], list[Moment]()
    watching = asyncio.create_task(watch(target, heard, moments))
    pairs = zip(sessions, heard, strict=True)
    async with connected() as clients:  # they hang up, so that nothing of them is left
        await asyncio.gather(*[hear(clients, session, f"ba {n} ke", one) for n, (session, one) in enumerate(pairs)])
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    lacking = await each(lambda session: faults(http, target, session, (1, num_tokens)), sessions)
    await release(http, target, sessions)
    errors = [one.error for one in heard if one.error is not None] + [fault for one in lacking for fault in one]
    peak_mb = max(moment.rss_mb for moment in moments)
    return Held(heard, moments, errors, memory_mb(target.pid, "VmRSS"), peak_mb)


async def streams(
    http: aiohttp.ClientSession, target: Target, num_streams: int, num_events: int, pace_s: float
) -> None:
    case = f"streams@{num_streams}"
    before_mb = memory_mb(target.pid, "VmRSS")
    first, again = [await hold(http, target, num_streams, NUM_PER_EVENT * num_events) for _ in range(2)]
    heard = first.heard + again.heard
    num_whole = sum(one.error is None for one in heard)
    row(case, "streams", num_whole, f"asked {len(heard)}")
    row(case, "errors", counted(first.errors + again.errors))
    if num_whole < len(heard):
        return  # the rest would say how errors perform
    row(case, "held_s", median(one.seconds for one in heard), f"of the engine {num_events * pace_s:.3f}")
    begun, middle, end = (first.at(share) for share in (1 / 6, 1 / 2, 0.95))
    asked_hz = num_streams / pace_s
    rate_hz = (end.num_events - begun.num_events) / (end.seconds - begun.seconds)
    row(case, "events_per_s", rate_hz, f"of the engine {asked_hz:.3f}", rate_hz / asked_hz)
    row(case, "cpu_us_per_event", 1e6 * (end.cpu_s - begun.cpu_s) / (end.num_events - begun.num_events))
    row(case, "cpu_ms_per_stream", 1e3 * (first.moments[-1].cpu_s - first.moments[0].cpu_s) / num_streams)
    for name, values in (
        ("longest_pause", [one.longest_pause_s for one in heard]),
        ("first_event", [one.first_s for one in heard]),
    ):
        p50_s, p99_s = percentiles(values)
        row(case, f"{name}_p50_s", p50_s, f"pace {pace_s:.3f}", p50_s / pace_s)
        row(case, f"{name}_p99_s", p99_s, f"pace {pace_s:.3f}", p99_s / pace_s)
    compared(case, "rss_middle_mb", (begun.rss_mb, middle.rss_mb), f"after {begun.seconds:.1f} s")
    compared(case, "rss_end_mb", (begun.rss_mb, end.rss_mb), f"after {begun.seconds:.1f} s")
    num_tokens = NUM_PER_EVENT * (end.num_events - begun.num_events)
    growth = MB * (end.rss_mb - begun.rss_mb) / num_tokens
    row(case, "growth_bytes_per_token", growth, "an id and a log-probability 8.000", growth / 8)
    compared(case, "rss_released_mb", (before_mb, first.released_mb), "before")
    compared(case, "rss_peak_again_mb", (first.peak_mb, again.peak_mb), "first")
    compared(case, "rss_released_again_mb", (first.released_mb, again.released_mb), "first")


# --- turns ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """What the sessions came to that began and ended together; what the gateway held is from after their release."""

    seconds: float
    latencies_s: list[float]
    cpu_s: float
    rss_mb: float
    num_fds: int
    num_threads: int
    errors: list[str] = field(default_factory=list)


async def play(client: Client, begins_s: float, num_turns: int) -> tuple[list[float], str | None]:
    """Take turns, each at its time, or at once where that has passed; the seconds of each, and what ended it early."""
    seconds = list[float]()
    for n in range(num_turns):
        await asyncio.sleep(max(0.0, begins_s + n * TURN_S - time.perf_counter()))
        try:
            seconds.append(await client.take())
        except (Refused, aiohttp.ClientError, TimeoutError, OSError) as e:
            return seconds, f"a turn failed: {type(e).__name__}: {e}"
    return seconds, None


async def take_batch(http: aiohttp.ClientSession, target: Target, plan: Plan, num_turns: int, seed: int) -> Batch:
    began_s = time.perf_counter()
    before_s = cpu_of(target.pid)
    sessions = [await opened(http, target, 0) for _ in range(plan.concurrency)]
    async with connected() as agents:
        clients = [Client(agents, *address(session), plan, seed + n) for n, session in enumerate(sessions)]
        starts_s = [began_s + n * TURN_S / plan.concurrency for n in range(plan.concurrency)]
        plays = [play(client, at_s, num_turns) for client, at_s in zip(clients, starts_s, strict=True)]
        played = await asyncio.gather(*plays)
        await asyncio.sleep(max(0.0, began_s + num_turns * TURN_S - time.perf_counter()))
    seconds, cpu_s = time.perf_counter() - began_s, cpu_of(target.pid) - before_s
    errors = [error for _, error in played if error is not None]
    for session, (taken, _) in zip(sessions, played, strict=True):
        await admin(http, target, "POST", f"/sessions/{session['id']}/seal")
        errors += await faults(http, target, session, (len(taken), NUM_REPLY + 1))
    await release(http, target, sessions)
    held = Path(f"/proc/{target.pid}")
    num_fds, num_threads = (sum(1 for _ in (held / name).iterdir()) for name in ("fd", "task"))
    latencies_s = [one for taken, _ in played for one in taken]
    return Batch(seconds, latencies_s, cpu_s, memory_mb(target.pid, "VmRSS"), num_fds, num_threads, errors)


async def turns(http: aiohttp.ClientSession, target: Target, minutes: float, num_turns: int) -> None:
    case = f"turns@{NUM_AGENTS}x{num_turns}"
    num_batches = max(2, round(60 * minutes / TURN_S / num_turns))
    plan = Plan(num_tokens=0, concurrency=NUM_AGENTS, stream=True, rounds=1, num_measured=0)
    batches = list[Batch]()
    for n in range(num_batches):
        batches.append(await take_batch(http, target, plan, num_turns, n * NUM_AGENTS))
        cpu_ms = 1e3 * batches[-1].cpu_s / max(1, len(batches[-1].latencies_s))
        progress = f"{n + 1} of {num_batches} batches: {cpu_ms:.2f} ms of CPU a turn, {batches[-1].rss_mb:.1f} MB"
        print(progress, file=sys.stderr)
    first, last = batches[0], batches[-1]
    num_taken = sum(len(batch.latencies_s) for batch in batches)
    row(case, "turns", num_taken, f"asked {num_batches * NUM_AGENTS * num_turns}")
    row(case, "errors", counted([error for batch in batches for error in batch.errors]))
    seconds, asked_hz = sum(batch.seconds for batch in batches), NUM_AGENTS / TURN_S
    row(case, "turns_per_s", num_taken / seconds, f"of the agents {asked_hz:.3f}", num_taken / seconds / asked_hz)
    for name, number in (("p50", 0), ("p99", 1)):
        values = [1e3 * percentiles(batch.latencies_s)[number] for batch in (first, last)]
        compared(case, f"turn_{name}_ms", (values[0], values[1]), "first batch")
    cpu_ms = [1e3 * batch.cpu_s / len(batch.latencies_s) for batch in (first, last)]
    compared(case, "cpu_ms_per_turn", (cpu_ms[0], cpu_ms[1]), "first batch")
    compared(case, "rss_released_mb", (first.rss_mb, last.rss_mb), "first batch")
    half = batches[len(batches) // 2]
    compared(case, "rss_released_2nd_half_mb", (half.rss_mb, last.rss_mb), "in the middle")
    compared(case, "fds", (first.num_fds, last.num_fds), "first batch")
    compared(case, "threads", (first.num_threads, last.num_threads), "first batch")


# --- the parts -----------------------------------------------------------------------------------------------------


def allow_files(num_wanted: int) -> None:
    """Of this process and those that it starts; SystemExit where the system allows too few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < num_wanted:
        raise SystemExit(f"{num_wanted} open files are needed, {most} are allowed; raise the hard limit (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_wanted if most == resource.RLIM_INFINITY else most, most))


async def under_load(work: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> None:
    async with connected() as http:
        await work(http)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=["streams", "turns"], help="only this one")
    parser.add_argument("--quick", action="store_true", help="fewer streams, shorter; two batches of short sessions")
    parser.add_argument("--streams", type=int, help="at the same time; default 1000")
    parser.add_argument("--seconds", type=float, help="of a stream; default 60")
    parser.add_argument("--pace", type=float, default=1.0, help="seconds between a stream's events of 8 tokens")
    parser.add_argument("--minutes", type=float, help="of turns; default 10")
    args = parser.parse_args()
    num_streams = args.streams or (100 if args.quick else 1000)
    num_events = round((args.seconds or (3 if args.quick else 60)) / args.pace)
    minutes, num_turns = args.minutes or (0.2 if args.quick else 10), 3 if args.quick else 40
    allow_files(2 * num_streams + 200)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_tokenizer(folder)
        for case in args.case or ("streams", "turns"):
            is_paced = case == "streams"
            num_reply = NUM_PER_EVENT * num_events - 1 if is_paced else NUM_REPLY
            with (
                fake_engine(reply_ids(tokenizer, num_reply), args.pace if is_paced else 0.0) as engine,
                Parts(folder, engine).gateway() as target,
            ):
                if is_paced:
                    uvloop.run(under_load(lambda http: streams(http, target, num_streams, num_events, args.pace)))
                else:
                    uvloop.run(under_load(lambda http: turns(http, target, minutes, num_turns)))


if __name__ == "__main__":
    main()
