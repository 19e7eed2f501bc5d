"""The seam between conversations and token ids: what is rendered is context, what is sampled is only parsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stenograph.types import Conversation, Ids, Reply


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that may be shown now: it can no longer become part of a tool call, a marker or an unfinished character."""

    content: str = ""
    reasoning: str = ""


class StreamParser(Protocol):
    """Incremental reading of one turn's sampled ids; one instance per turn."""

    def feed(self, ids: Ids) -> Delta:
        """Take newly sampled ids, return what they allow to show."""
        ...

    def finish(self) -> Delta:
        """Return what was held back and turned out to be text."""
        ...

    @property
    def reply(self) -> Reply:
        """What `parse` reads in all that was fed; there after `finish`."""
        ...


class Rendering(Protocol):
    """Conversation <-> ids for one model."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""
        ...

    @property
    def longest_token(self) -> int:
        """Characters of the longest token, so that a text of n has at least n / longest_token tokens."""
        ...

    @property
    def extends_flat(self) -> bool:
        """Whether `extend` costs what is new alone, however long the conversation is."""
        ...

    def render(self, conversation: Conversation) -> Ids:
        """The whole prompt, generation prompt included. Raises RequestError where the template refuses the messages."""
        ...

    def extend(self, conversation: Conversation, num_known: int, prompt_ids: Ids, output_ids: Ids) -> Ids | None:
        """The context that follows `output_ids` when messages[num_known:] are new.

        messages[num_known - 1] is the assistant message that `output_ids` (as sampled, with or without terminator) say;
        where the agent had begun it, `prompt_ids` ends with what `begin_reply` gave, and the message is both in one.
        Starts with the tokens that close an unterminated output; ends with the generation prompt.
        None where it cannot be proven that the result continues the recorded ids: the caller renders in full and forks.
        """
        ...

    def begin_reply(self, conversation: Conversation, prompt_ids: Ids) -> Ids:
        """The ids after `prompt_ids` with which the model goes on in the middle of messages[-1], an assistant's.

        `prompt_ids` is the prompt for the messages before it, generation prompt included. Reasoning that it opened is
        closed (after the message's own, if it has some); the content follows, without white space before it, for no
        parser keeps that; nothing ends the turn. What was begun and what is sampled, as one output, parse to one reply.
        Raises RequestError where the message cannot be gone on with.
        """
        ...

    def parse(self, output_ids: Ids, prompt_ids: Ids, conversation: Conversation) -> Reply:
        """Read a whole turn. Tool-call ids are empty: the gateway mints them. Never raises on what a model wrote."""
        ...

    def stream(self, prompt_ids: Ids, conversation: Conversation) -> StreamParser:
        """A parser whose joined deltas equal `parse(...)`'s content and reasoning."""
        ...

    def decode(self, ids: Ids) -> str:
        """Text of `ids`, special tokens included."""
        ...

    def encode_reply(self, reply: Reply) -> Ids:
        """Ids of an assistant turn as a model of this family would write it, terminator included (scripted engine)."""
        ...

    def encode_text(self, text: str) -> Ids:
        """Ids of `text`, special tokens in it recognised."""
        ...
