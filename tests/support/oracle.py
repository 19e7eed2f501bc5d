"""An engine that says anything, at any pace, and remembers call by call what it was sent and what it returned."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np

from stenograph.engines.base import Chunk, Generate
from stenograph.engines.scripted import ScriptedEngine
from stenograph.errors import EngineError
from stenograph.rendering import Rendering
from stenograph.types import Ids, Logprobs, Reply, ToolCall

TEXTS = [
    "{}",
    "{} done",
    "  {}\n",
    "{} is what there is to say, at length",
    "{}\nand then\n\n  more é🙂",
    "```\n{}\n```\n\nfirst\nsecond",
    '{} "quoted" \\n',
]
# What is no object is malformed: clients can do nothing with it.
ARGUMENTS = [
    "{{}}",
    '{{"word":"{}"}}',
    '{{ "b" : 2.50,"a":"{}", "n":1.0e4 }}',
    '{{"é":"\\u00e9 {}","big":123456789012345678,"small":1E-7}}',
    '{{"z":{{"y":[1,  2.0, null],"x":true}},"word":"{}"}}',
    '{{"text":"{}\\n\\"<tool_call>\\"\\/"}}',
    '"{} {{"',
    '"{{\\"word\\": \\"{}\\", \\"open\\": [1"',
    '["{}"]',
    "null",
]
BROKEN_CALL = '{}\n<tool_call>\n{{"name": "f", "arguments": {{"word": "{}"\n</tool_call><|im_end|>'


@dataclass(eq=False, slots=True)
class Generation:
    """One call of the engine; its number is its policy version and shows in every log-probability."""

    number: int
    prompt: Ids
    output: list[int] = field(default_factory=list)
    failed: bool = False

    @property
    def path(self) -> Ids:
        return np.concatenate([self.prompt, np.array(self.output, np.int32)])

    def logprobs(self, start: int, end: int) -> Logprobs:
        """Of output[start:end]: no two tokens of a session have the same."""
        return (-self.number - np.arange(start, end) / 4096).astype(np.float32)


class Oracle(ScriptedEngine):
    """Its replies follow from the prompt and from how often that was asked, not from the order of concurrent calls."""

    def __init__(self, rendering: Rendering, seed: int) -> None:
        super().__init__([])
        self._rendering = rendering
        self._salt = seed
        self._num_asked: Counter[str] = Counter()
        self.generations: dict[int, Generation] = {}

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        generation = Generation(len(self.generations) + 1, request.ids.copy())
        self.generations[generation.number] = generation
        digest = hashlib.sha256(request.ids.tobytes()).hexdigest()
        times, self._num_asked[digest] = self._num_asked[digest], self._num_asked[digest] + 1
        chance = random.Random(f"{self._salt} {digest} {times}")
        ids = self._reply(digest, times, chance)[: request.sampling.max_tokens]
        fails_at = chance.choice([0, chance.randrange(len(ids))]) if chance.random() < 0.06 else None
        await asyncio.sleep(chance.choice([0, 0, 0.002, 0.005]))
        while (start := len(generation.output)) < len(ids):
            if fails_at is not None and start >= fails_at:
                generation.failed = True
                raise EngineError("at random")
            end = min(start + chance.choice([1, 7, 100, 1000]), len(ids) if fails_at is None else max(fails_at, 1))
            generation.output += ids[start:end].tolist()
            ended = "stop" if int(ids[-1]) in request.stop_token_ids else "length"
            finish_reason = ended if end == len(ids) else None
            yield Chunk(ids[start:end], generation.logprobs(start, end), generation.number, finish_reason)
            await asyncio.sleep(0)

    def _reply(self, digest: str, times: int, chance: random.Random) -> Ids:
        """A new reply; where a prompt comes again, sometimes the first again: id for id, or the same text in others."""
        repeats = times > 0 and chance.random() < 0.6
        ids = self._say(random.Random(f"{self._salt} {digest} {0 if repeats else times} says"))
        if repeats and chance.random() < 0.5:  # no parser keeps white space at the end
            ids = np.concatenate([ids[:-1], self._rendering.encode_text("\n" * times), ids[-1:]])
        return ids

    def _say(self, chance: random.Random) -> Ids:
        """A model's turn; its words are found in no other turn."""

        def word(kind: str) -> str:
            return f"{kind}_{chance.getrandbits(24):06x}"

        if chance.random() < 0.05:
            return self._rendering.encode_text(BROKEN_CALL.format(word("w"), word("w")))
        num_calls = chance.choice([0, 0, 0, 1, 1, 2, 3])
        calls = [
            ToolCall("", chance.choice("fg"), chance.choice(ARGUMENTS).format(word("w"))) for _ in range(num_calls)
        ]
        content = chance.choice(TEXTS).format(word("w")) if not calls or chance.random() < 0.5 else ""
        reasoning = f"{word('r')} because\nof é" if chance.random() < 0.5 else ""
        return self._rendering.encode_reply(Reply(content, reasoning, tuple(calls)))
