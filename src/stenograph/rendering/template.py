"""Any other chat template: what follows a recorded turn is the difference of two renderings, or nothing at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stenograph.errors import ConfigError, RequestError, boundary
from stenograph.rendering.base import StreamParser
from stenograph.rendering.detokenize import Detokenizer
from stenograph.rendering.messages import (
    AS_GIVEN,
    ASK,
    MARK,
    Placement,
    begun_message,
    ends_reasoning,
    find_placement,
    message_dicts,
    opening,
    tool_dicts,
)
from stenograph.rendering.response import ResponseReader
from stenograph.rendering.stream import BufferedStream, TextStream
from stenograph.rendering.tokenizer import longest_token
from stenograph.types import Conversation, Ids, Message, Reply, Tool, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Retention = Literal["all", "tool_cycle", "template"]

_MARK_ARGUMENTS = '{"k":  "Zvalue"}'  # spaced as no serialiser would


@dataclass(frozen=True, slots=True)
class Shape:
    """What stand-in conversations show about a template."""

    generation: str  # the generation prompt
    close: str  # what follows an assistant's text, from the end token on; "" where there is no such token
    close_id: int | None
    raw_arguments: bool  # arguments may be a string and are printed as it stands
    keeps_reasoning: bool
    placement: Placement


class TemplateRendering:
    """`Rendering` over `apply_chat_template`. A turn's cost is linear in the conversation's text, not in its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reader: ResponseReader, retention: Retention) -> None:
        self._tokenizer = tokenizer
        self._reader = reader
        self._retention = retention
        self._detokenizer = Detokenizer(tokenizer) if Detokenizer.supports(tokenizer) else None
        self._longest_token = longest_token(tokenizer)
        self._shape = _probe(tokenizer)
        stop = [self._shape.close_id, tokenizer.eos_token_id]
        self._stop = tuple(dict.fromkeys(token for token in stop if isinstance(token, int)))
        self._generation_ids = self.encode_text(self._shape.generation)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop

    @property
    def longest_token(self) -> int:
        return self._longest_token

    @property
    def extends_flat(self) -> bool:
        return False  # the proof renders all of the text

    def render(self, conversation: Conversation) -> Ids:
        with boundary(RequestError, "render the messages with the model's chat template"):
            return self.encode_text(self._render(conversation.messages, conversation.tools, generation=True))

    def extend(self, conversation: Conversation, num_known: int, prompt_ids: Ids, output_ids: Ids) -> Ids | None:
        """See `Rendering.extend`. The proof, on text: the template renders the messages before the reply, with the
        reply, and with all that is new, and each rendering begins with the one before; so it rewrites nothing that is
        recorded, and what the last one adds is the new messages. The difference is cut behind the reply's end token,
        where tokenisation starts afresh, so its ids are those of a full rendering.
        """
        messages, tools, shape = conversation.messages, conversation.tools, self._shape
        if shape.close_id is None or self._must_render(messages, num_known):
            return None
        with boundary(RequestError, "render the new messages with the model's chat template"):
            whole = self._render(messages, tools, generation=True)
        try:
            asked = self._render(messages[: num_known - 1], tools) if num_known > 1 else ""
            answered = self._render(messages[:num_known], tools)
        except Exception:  # a template may refuse the shorter conversation, in words of its own
            return None
        if not (answered.startswith(asked) and whole.startswith(answered) and answered.endswith(shape.close)):
            return None
        if self._retention == "template":
            said = asked + shape.generation + self._begun(prompt_ids) + self.decode(self._until_stop(output_ids))
            if not answered.startswith(said):
                return None
        ids = self.encode_text(shape.close + whole[len(answered) :])
        ended = len(output_ids) > 0 and output_ids[-1] == shape.close_id
        return ids[1:] if ended else ids

    def begin_reply(self, conversation: Conversation, prompt_ids: Ids) -> Ids:
        message = begun_message(conversation)
        with boundary(RequestError, "render the begun message with the model's chat template"):
            text = opening(self._render_reply, message.reasoning)
        if text is None:
            close = self._reader.unclosed(self._prefix(prompt_ids))
            text = f"{message.reasoning}\n{close}\n\n" if close else ""
        return self.encode_text(text + message.content.lstrip())

    def parse(self, output_ids: Ids, prompt_ids: Ids, conversation: Conversation) -> Reply:
        return self._reader.read(self.decode(self._until_stop(output_ids)), self._prefix(prompt_ids))

    def stream(self, prompt_ids: Ids, conversation: Conversation) -> StreamParser:
        if self._detokenizer is None or not self._reader.incremental:
            return BufferedStream(lambda ids: self.parse(ids, prompt_ids, conversation))
        return TextStream(self._detokenizer, self._stop, self._reader.start(self._prefix(prompt_ids)))

    def decode(self, ids: Ids) -> str:
        return str(self._tokenizer.decode(ids.tolist()))

    def encode_reply(self, reply: Reply) -> Ids:
        with boundary(RequestError, "render a reply with the model's chat template"):
            asked = self._render((ASK,), (), generation=True)
            answered = self._render((ASK, reply.message()), ())
        start = next((i for i, (a, b) in enumerate(zip(asked, answered, strict=False)) if a != b), len(asked))
        turn = answered[start:]
        if self._shape.close and self._shape.close in turn:
            turn = turn[: turn.rindex(self._shape.close)]
        return np.append(self.encode_text(turn), np.asarray(self._stop[:1], np.int32))

    def encode_text(self, text: str) -> Ids:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def _render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...], *, generation: bool = False) -> str:
        shape = self._shape
        return _apply(
            self._tokenizer,
            Conversation(messages, tools),
            generation=generation,
            raw_arguments=shape.raw_arguments,
            placement=shape.placement,
        )

    def _render_reply(self, reply: Message | None) -> str:
        """A stand-in question with `reply`, or with the generation prompt."""
        return self._render((ASK, reply) if reply else (ASK,), (), generation=reply is None)

    def _begun(self, prompt_ids: Ids) -> str:
        """What follows the generation prompt: the text with which the agent began the reply."""
        _, found, begun = self._end(prompt_ids).rpartition(self._shape.generation or "\0")
        return begun if found else ""

    def _must_render(self, messages: tuple[Message, ...], num_known: int) -> bool:
        """Whether reasoning in the recorded context has to go; a template that prints it says so in the proof."""
        return (
            self._retention != "all"
            and not self._shape.keeps_reasoning
            and ends_reasoning(messages, num_known, self._shape.placement)
        )

    def _prefix(self, prompt_ids: Ids) -> str:
        """The generation prompt that this prompt ends with."""
        size = len(self._generation_ids)
        if np.array_equal(prompt_ids[len(prompt_ids) - size :], self._generation_ids):
            return self._shape.generation
        return self._end(prompt_ids)

    def _end(self, prompt_ids: Ids) -> str:
        """The text of a prompt from its last end token on."""
        hits = np.flatnonzero(np.isin(prompt_ids, self._stop))
        return self.decode(prompt_ids[hits[-1] + 1 :]) if len(hits) else ""

    def _until_stop(self, ids: Ids) -> Ids:
        hits = np.flatnonzero(np.isin(ids, self._stop))
        return ids[: hits[0]] if len(hits) else ids


def _probe(tokenizer: PreTrainedTokenizerBase) -> Shape:
    """Learn a template's shape. Raises ConfigError where it cannot render a question and an answer."""
    answer = Message("assistant", MARK)
    try:
        asked = _apply(tokenizer, Conversation((ASK,)))
        prompt = _apply(tokenizer, Conversation((ASK,)), generation=True)
        answered = _apply(tokenizer, Conversation((ASK, answer)))
    except Exception as e:  # templates raise what they like
        raise ConfigError(
            f"model.chat_template: it cannot render a question and an answer ({type(e).__name__}: {e}); "
            "set model.chat_template to a Jinja file that does, or model.renderer to the model's family"
        ) from e
    generation = prompt[len(asked) :] if prompt.startswith(asked) else ""
    close, close_id = _closing(tokenizer, answered.rpartition(MARK)[2] if MARK in answered else "")
    call = Message("assistant", "", tool_calls=(ToolCall("0", "f", _MARK_ARGUMENTS),))
    thought = Message("assistant", "a", reasoning=MARK)
    return Shape(
        generation,
        close,
        close_id,
        raw_arguments=_prints(tokenizer, call, _MARK_ARGUMENTS),
        keeps_reasoning=_prints(tokenizer, thought, MARK),
        placement=find_placement(lambda messages: _apply(tokenizer, Conversation(tuple(messages)), generation=True)),
    )


def _closing(tokenizer: PreTrainedTokenizerBase, tail: str) -> tuple[str, int | None]:
    """From the first special token in `tail` on: there, tokenisation cannot depend on what came before."""
    for token in tokenizer.encode(tail, add_special_tokens=False):
        added = tokenizer.added_tokens_decoder.get(token)
        if added is not None and added.special and not added.lstrip:
            return tail[tail.index(added.content) :], token
    return "", None


def _prints(tokenizer: PreTrainedTokenizerBase, message: Message, text: str) -> bool:
    """Whether the template prints `text` of an assistant message that a new question follows."""
    try:
        return text in _apply(tokenizer, Conversation((ASK, message, ASK)), raw_arguments=True)
    except Exception:  # templates raise what they like; one that refuses does not print
        return False


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    generation: bool = False,
    raw_arguments: bool = False,
    placement: Placement = AS_GIVEN,
) -> str:
    tools: Any = tool_dicts(conversation.tools)
    messages = message_dicts(conversation, placement=placement, parse_arguments=not raw_arguments)
    return str(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generation, tokenize=False))
