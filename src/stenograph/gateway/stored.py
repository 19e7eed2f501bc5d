"""Responses that a request may go on from by id: a traced session reads them from its tree, and keeps nothing twice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from stenograph.dialects.base import Answered, Request
from stenograph.dialects.minted import turn_id
from stenograph.errors import RequestError
from stenograph.traces.trace import TraceTree
from stenograph.types import Message

_PREFIX = "resp_"
_MAX_UNTRACED = 256  # kept with their whole conversation, the oldest forgotten first


@dataclass(slots=True, eq=False)
class StoredResponses:
    """One session's, by the name of their turn."""

    _untraced: dict[str, tuple[Message, ...]] = field(default_factory=dict)

    def resolve(self, request: Request, tree: TraceTree | None) -> Request:
        """`request` with all that it names. Raises RequestError where that is not there."""
        if request.previous is None and not request.references:
            return request
        messages = list(request.conversation.messages)
        for position, name in request.references.items():
            messages[position] = self._said(name, tree, "input")[-1]
        if request.previous is not None:
            name = request.previous.removeprefix(_PREFIX)
            at = request.num_instructions
            messages[at:at] = self._said(name, tree, "previous_response_id")
        return replace(request, conversation=replace(request.conversation, messages=tuple(messages)))

    def _said(self, name: str, tree: TraceTree | None, param: str) -> tuple[Message, ...]:
        """The conversation up to the response named `name`, its reply last."""
        messages, turn = self._untraced.get(name), turn_id(name)
        if tree is not None and turn in tree and (num_instructions := tree.turn(turn).num_instructions) is not None:
            messages = tree.said(turn)[num_instructions:]
        if messages is None:
            told = f"{param}: no response {name!r} is stored in this session; send its items"
            raise RequestError(told, code="previous_response_not_found", param=param)
        return messages

    def keep(self, name: str, request: Request, answered: Answered) -> None:
        """Remember the response named `name` of an untraced session; instructions are not carried over to the next."""
        if not request.store:
            return
        said = (*request.conversation.messages, answered.turn.reply.message())
        self._untraced[name] = said[request.num_instructions :]
        if len(self._untraced) > _MAX_UNTRACED:
            del self._untraced[next(iter(self._untraced))]
