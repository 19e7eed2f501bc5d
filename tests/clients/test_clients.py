"""Real agent programs against a real gateway process: what they did is recorded as it was sampled, whatever goes wrong.

Each is told to write a file, and its model is a script: a call of the program's own shell tool, then a final text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stenograph.config import ModelConfig
from stenograph.engines.scripted import Line, load_script
from stenograph.processes import Finished
from stenograph.rendering import Rendering, load_rendering
from support.clients import CLIENTS, PINS, Client
from support.serving import serving, write_script
from support.tokenizers import EXAMPLE_TEMPLATE, any_arguments

pytestmark = pytest.mark.clients

PROMPT, ANSWER, FILE, MADE = "Write the file and tell me.", "The file is written.", "made.txt", "made by the agent"
REQUIRED = {name for name in os.environ.get("STENO_REQUIRE", "").split(",") if name}

# What a client changes of the replies that it sends back.
RESPELLED = frozenset({"arguments_respelled"})
CHANGED = {client.name: RESPELLED for client in CLIENTS} | {
    "codex": frozenset(),
    "opencode-openai": RESPELLED | {"reasoning_dropped"},
}
# Of a call that does not parse, most send back the raw text, or an object that the protocol has for it.
MENDED = {name: {"arguments_mended"} for name in ("kimi-code-kimi", "kimi-code-openai", "kimi-code-openai_responses")}
MENDED |= {name: {"call_mended"} for name in ("opencode-openai-compatible", "opencode-openai")}
ASKS_AGAIN = {"qwen-code"}  # as if nothing had been said
# Where a stream breaks, most ask again. This one ends where it sees the error before the end.
ENDS = {"opencode"}
# Or they show the model the text that had arrived: before its next reply, or with a request to go on from it, which
# they leave out of the history afterwards. The cause of the fork.
KEEP_TEXT = {"opencode": "message_inserted", "qwen-code": "message_changed"}


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of a client, and what the gateway says of it afterwards."""

    finished: Finished
    made: str | None  # what the file holds that its tool was to write
    script: Sequence[Line]
    rendering: Rendering
    turns: Sequence[Mapping[str, Any]]
    samples: Sequence[Mapping[str, Any]]
    drift: Sequence[Mapping[str, Any]]
    ledger: Mapping[str, Any]

    @property
    def accepted(self) -> set[str]:
        return {name for turn in self.turns for name in turn["accepted"]}

    def check_done(self) -> None:
        """The tool was run, and the client came to its end."""
        assert (self.finished.exit_code, self.made) == (0, f"{MADE}\n"), self.finished
        assert self.finished.stdout.rstrip().endswith(ANSWER), self.finished

    def check_recorded(
        self, *branches: Sequence[Line], beside: Sequence[Line] = (), causes: Sequence[str] = ()
    ) -> None:
        """Each branch is a sample whose trained tokens are what the script said, and every token is accounted for.

        What was said `beside` them is on no branch. `causes` are those of the forks.
        """
        assert {(turn["role"], turn["state"]) for turn in self.turns} <= {("main", "delivered")}
        assert [fork["cause"] for fork in self.drift] == list(causes)
        for sample, lines in zip(self.samples, branches, strict=True):
            _check_sample(sample, lines)
        num_recorded = sum(len(line.ids) for lines in (*branches, beside) for line in lines)
        num_cut = sum(len(line.ids) // 2 for line in self.script if line.fault == "cut")
        assert self.ledger == {
            "sampled": num_recorded + num_cut,
            "trained": 0,
            "masked": {},
            "dropped": {"engine_failed": num_cut} if num_cut else {},
            "in_flight": num_recorded,
        }

    def check_result(self) -> None:
        """What the tool printed stands in the last sample, as context."""
        sample = self.samples[-1]
        context = np.array(sample["ids"], np.int32)[~np.array(sample["loss_mask"], bool)]
        assert self.rendering.decode(context).count(f"{MADE}\n") == 1


def _check_sample(sample: Mapping[str, Any], lines: Sequence[Line]) -> None:
    assert (sample["role"], sample["reward"]) == ("main", 1.0)
    ids, logprobs = np.array(sample["ids"]), np.array(sample["rollout_logprobs"])
    sampled = np.zeros(len(ids), bool)
    for turn, line in zip(sample["turns"], lines, strict=True):
        sampled[turn["start"] : turn["end"]] = True
        assert ids[turn["start"] : turn["end"]].tolist() == line.ids.tolist()
        assert turn["ended_by"] == "eos"
    assert np.array_equal(np.array(sample["loss_mask"], bool), sampled)
    assert np.array_equal(np.array(sample["versions"]), np.where(sampled, 0, -1))
    assert np.array_equal(logprobs < 0, sampled)


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def client(request: pytest.FixtureRequest) -> Client:
    client: Client = request.param
    assert set(PINS) >= REQUIRED, f"STENO_REQUIRE names {REQUIRED - set(PINS)}; known: {', '.join(PINS)}"
    if not client.is_installed:
        assert client.package not in REQUIRED, f"{client.package} is required and not installed; run make clients"
        pytest.skip(f"{client.package} is not installed; make clients brings it")
    return client


async def run(client: Client, folder: Path, *lines: Mapping[str, Any], model: Sequence[str] = ()) -> Ran:
    """Let a client work with a model that says `lines`; `model` are settings of that section."""
    engine = write_script(folder / "script.jsonl", *lines)
    model = ["thinking_retention=all", *model]
    settings = ["gateway.keep_alive_s=0.5", *(f"model.{setting}" for setting in model)]
    with serving("--engine", engine, *(word for setting in settings for word in ("--set", setting))) as server:
        session = server.open()
        finished = await client.run(session, PROMPT, folder)
        server.call("POST", f"/sessions/{session['id']}/seal", {"reward": 1.0})
        tree, samples, drift, ledger = (
            server.call("GET", f"/sessions/{session['id']}/{name}") for name in ("tree", "samples", "drift", "ledger")
        )
    rendering = load_rendering(ModelConfig.model_validate(dict(setting.split("=", 1) for setting in model)))
    script = load_script(folder / "script.jsonl", rendering)
    file = folder / "work" / FILE
    made = file.read_text() if file.exists() else None
    return Ran(finished, made, script, rendering, tree["turns"], samples, drift, ledger)


def calls(client: Client, **line: Any) -> dict[str, Any]:
    """The call of its shell, written as no serialiser would. Some tools lose what is printed right before the end."""
    arguments = f'{{"{client.argument}":   "echo {MADE} > {FILE} && cat {FILE} && sleep 0.3"}}'
    called = [{"name": client.shell, "arguments": arguments}]
    return {"reasoning": "It is for the shell.", "content": "I write it.", "tool_calls": called, **line}


def answers(**line: Any) -> dict[str, Any]:
    return {"reasoning": "That is all.", "content": ANSWER, **line}


async def test_its_tool_runs_and_all_that_was_sampled_is_one_sample(client: Client, tmp_path: Path) -> None:
    ran = await run(client, tmp_path, calls(client), answers())
    ran.check_done()
    ran.check_result()
    ran.check_recorded(ran.script)
    assert ran.accepted == CHANGED[client.name]


async def test_a_slow_engine_is_waited_for(client: Client, tmp_path: Path) -> None:
    ran = await run(client, tmp_path, calls(client, fault="slow:3"), answers(fault="pace:0.03"))
    ran.check_done()
    ran.check_recorded(ran.script)


async def test_what_the_engine_failed_is_asked_again(client: Client, tmp_path: Path) -> None:
    ran = await run(client, tmp_path, answers(fault="error"), calls(client), answers())
    ran.check_done()
    ran.check_recorded(ran.script[1:])


async def test_a_call_that_breaks_off_is_dropped(client: Client, tmp_path: Path) -> None:
    ran = await run(client, tmp_path, calls(client, fault="cut"), calls(client), answers())
    if client.package in ENDS and ran.finished.exit_code != 0:
        assert ran.made is None
        ran.check_recorded()
        return
    ran.check_done()
    if client.package in KEEP_TEXT and ran.drift:
        ran.check_recorded(ran.script[1:2], ran.script[2:], causes=[KEEP_TEXT[client.package]])
    else:
        ran.check_recorded(ran.script[1:])


async def test_an_answer_that_breaks_off_is_dropped(client: Client, tmp_path: Path) -> None:
    ran = await run(client, tmp_path, calls(client), answers(fault="cut"), answers())
    if client.package in ENDS and ran.finished.exit_code != 0:
        ran.check_recorded(ran.script[:1])
        return
    ran.check_done()
    ran.check_recorded([ran.script[0], ran.script[2]])


async def test_a_call_that_does_not_parse_is_context_of_the_next(client: Client, tmp_path: Path) -> None:
    any_arguments(tmp_path)
    model = (f"chat_template={EXAMPLE_TEMPLATE}", f"response_schema={tmp_path / 'response_schema.json'}")
    arguments = f'{{"{client.argument}": "echo never > {FILE}'
    broken = {"content": "I try.", "tool_calls": [{"name": client.shell, "arguments": arguments}]}
    ran = await run(client, tmp_path, broken, calls(client, reasoning=""), answers(reasoning=""), model=model)
    ran.check_done()
    assert "malformed_arguments" in ran.turns[0]["notes"]
    if client.name in ASKS_AGAIN:
        ran.check_recorded(ran.script[1:], beside=ran.script[:1])
    else:
        ran.check_recorded(ran.script)
    assert ran.accepted == CHANGED[client.name] - {"reasoning_dropped"} | MENDED.get(client.name, set())
