"""A request's prompt: the ids of the turn that it goes on from, and after them what is new in it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from stenograph.errors import ContextOverflow, RequestError
from stenograph.gateway.sessions import Session
from stenograph.rendering.base import Rendering
from stenograph.traces.store import TraceStore
from stenograph.types import Conversation, Ids, Message, Reply

_INLINE_CHARS = 256 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation in ids. `begun` is the reply's beginning where the agent wrote it; its ids end `ids`."""

    parent: str | None
    messages: tuple[Message, ...]  # those that the parent does not know
    accepted: tuple[str, ...]  # differences from what the parent knows
    context_ids: Ids  # after the parent's, or all
    ids: Ids
    asked: Conversation  # what is answered: as it is recorded, and without what was begun
    begun: Message | None = None
    num_begun: int = 0  # tokens

    @property
    def extends(self) -> bool:
        """Whether the parent's ids are kept."""
        return len(self.context_ids) < len(self.ids)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A turn's prompt and output, which begins at `split`."""

    ids: Ids
    split: int


class Prompts:
    """Renders requests against the record."""

    def __init__(self, rendering: Rendering, store: TraceStore, context_length: int) -> None:
        self._rendering = rendering
        self._store = store
        self._context_length = context_length

    async def make(self, session: Session, conversation: Conversation) -> Prompt:
        """Continue the deepest recorded turn where its ids can be kept, else render from the start: a fork."""
        begun = conversation.messages[-1] if conversation.continues else None
        asked = conversation
        if begun is not None:
            asked = Conversation(conversation.messages[:-1], conversation.tools)
        if not asked.messages:
            raise RequestError("messages: nothing stands before the reply that is to be gone on with; send a question")
        match = self._store.match(session.id, asked) if session.traced else None
        if match is not None:
            asked = match.asked
        num_known = match.num_known if match is not None else 0
        new = asked.messages[num_known:]
        self._refuse_far_too_long(new)
        recorded = self._recorded(session, match.turn) if match is not None else None
        context_ids, ids = await self._render(asked, num_known, recorded)
        num_begun = 0
        if begun is not None:
            begun_ids = self._rendering.begin_reply(conversation, ids)
            context_ids, ids = np.concatenate([context_ids, begun_ids]), np.concatenate([ids, begun_ids])
            num_begun = len(begun_ids)
        parent, accepted = (match.turn, match.accepted) if match is not None else (None, ())
        return Prompt(parent, new, accepted, context_ids, ids, asked, begun, num_begun)

    def _recorded(self, session: Session, turn: str) -> _Recorded:
        tree = self._store.tree(session.id)
        ids = tree.path_ids(turn)
        return _Recorded(ids, len(ids) - len(tree.turn(turn).output_ids))

    async def _render(self, asked: Conversation, num_known: int, recorded: _Recorded | None) -> tuple[Ids, Ids]:
        """What comes after `recorded`, and the whole prompt; both are the whole where it cannot be continued."""
        if recorded is not None:
            read = asked.messages[num_known:] if self._rendering.extends_flat else asked.messages
            context_ids = await _run(read, lambda: self._extend(asked, num_known, recorded))
            if context_ids is not None:
                return context_ids, np.concatenate([recorded.ids, context_ids])
        ids = await _run(asked.messages, lambda: self._rendering.render(asked))
        # The template was free to rewrite what was said; where it did not, the branch goes on all the same.
        num_recorded = len(recorded.ids) if recorded is not None else 0
        kept = recorded is not None and len(ids) > num_recorded and np.array_equal(ids[:num_recorded], recorded.ids)
        return ids[num_recorded:] if kept else ids, ids

    def _refuse_far_too_long(self, new: tuple[Message, ...]) -> None:
        """Raise ContextOverflow where no tokenizer could make it fit: finding that out by rendering takes minutes."""
        fewest = math.ceil(sum(len(message.content) for message in new) / self._rendering.longest_token)
        if fewest > self._context_length:
            raise ContextOverflow(fewest, self._context_length)

    def _extend(self, asked: Conversation, num_known: int, recorded: _Recorded) -> Ids | None:
        """What comes after `recorded`; None where it cannot be kept.

        A reply that is new was no turn of ours (of an attempt that failed, say): it stands like one that was sampled.
        """
        ids, split, end = recorded.ids, recorded.split, num_known
        while end < len(asked.messages):
            start, messages = end, asked.messages
            end = next((i for i in range(start, len(messages)) if messages[i].role == "assistant"), len(messages))
            if end == start:
                return None
            said = Conversation(messages[:end], asked.tools)
            added = self._rendering.extend(said, start, ids[:split], ids[split:])
            if added is None:
                return None
            ids = np.concatenate([ids, added])
            if end < len(messages):
                split, written = len(ids), self._written(messages[end])
                if written is None:
                    return None
                ids, end = np.concatenate([ids, written]), end + 1
        return ids[len(recorded.ids) :]

    def _written(self, message: Message) -> Ids | None:
        """A reply as the model would have written it; None where it could not, its arguments being no JSON, say."""
        try:
            return self._rendering.encode_reply(Reply(message.content, message.reasoning, message.tool_calls))
        except RequestError:
            return None


def _num_chars(message: Message) -> int:
    return len(message.content) + len(message.reasoning) + sum(len(call.arguments) for call in message.tool_calls)


async def _run(read: tuple[Message, ...], work: Callable[[], T]) -> T:
    """`work` that reads these messages; on a thread where that takes long, so that it holds nobody else up."""
    return work() if sum(map(_num_chars, read)) <= _INLINE_CHARS else await asyncio.to_thread(work)
