"""Taking a turn: prepared, generated, committed; whoever waits for it learns of its end after the commit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from stenograph.config import Config
from stenograph.dialects.base import Answered
from stenograph.dialects.minted import call_id, turn_id, turn_name
from stenograph.engines.base import Engine, Generate
from stenograph.errors import EngineError, RequestError, StenographError, TraceError, boundary
from stenograph.gateway.calls import Call, State
from stenograph.gateway.output import Aborted, Output, Unsound, checked
from stenograph.gateway.prompts import Prompt, Prompts
from stenograph.gateway.roles import Role, client_session
from stenograph.gateway.sampling import resolve
from stenograph.gateway.sessions import Session
from stenograph.rendering.base import Rendering
from stenograph.traces.store import TraceStore
from stenograph.types import Conversation, Ids, Payload, Reply, Sampling, Turn

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 5.0

# What the turns that answer a prompt of a session are named, and all ids that a client is given after them, from what
# they would be.
Names = Callable[[str, Ids, Sequence[str]], Sequence[str]]


def as_proposed(session: str, prompt: Ids, names: Sequence[str]) -> Sequence[str]:
    return names


class Turns:
    """Answers calls: renders them, has them sampled, records what came."""

    def __init__(
        self, engine: Engine, rendering: Rendering, store: TraceStore, config: Config, names: Names = as_proposed
    ) -> None:
        self._engine = engine
        self.rendering = rendering
        self._prompts = Prompts(rendering, store, engine.capabilities.context_length)
        self._store = store
        self._names = names
        self._sampling = config.sampling
        self._idle_timeout_s = config.gateway.idle_timeout_s
        self._wants_experts = config.engine.experts

    async def take(self, session: Session, call: Call) -> None:
        """Bring `call` to its commit or to its failure; then nothing of it is recorded but what was sampled in vain."""
        clock = time.monotonic()
        outputs: list[Output] = []
        try:
            prompt, sampling, notes = await self._prepare(session, call)
            continued = self._continued(session, prompt.parent)
            role = session.roles.of(call.headers, call.request, continued)
            outputs += self._outputs(call, prompt, sampling)
            call.advance(State.GENERATING)
            await self._generate(session, call, prompt, outputs)
            if continued is None:
                role = session.roles.again(call.headers, call.request, role)
            turns, answered = self._turns(session, call, prompt, role, notes, outputs, time.monotonic() - clock)
            if session.traced:
                with boundary(TraceError, "record the turn"):
                    self._store.commit(session.id, prompt.parent, *turns)
                session.roles.remember(call.headers, call.request, role, continued)
            session.count(turns)
            call.committed(answered)
        except asyncio.CancelledError:
            self._fail(session, call, outputs, session.closed())
            raise
        except Exception as e:
            self._fail(session, call, outputs, e)
        finally:
            self._store.payloads.release([call.holder])

    async def tell_again(self, session: Session, call: Call, names: Sequence[str]) -> None:
        """Bring `call` to the commit of the turns that have these names: what they sampled is read as it was then."""
        try:
            tree = self._store.tree(session.id)
            turns = [tree.turn(name) for name in names]
            ids = tree.path_ids(names[0])[: tree.node(names[0]).start]
            prompt = replace(await self._prompts.make(session, call.request.conversation), ids=ids)
            call.prepared(len(ids), [turn_name(name) for name in names])
            outputs = self._outputs(call, prompt, turns[0].sampling)
            call.advance(State.GENERATING)
            answered = []
            for turn, output in zip(turns, outputs, strict=True):
                shown = _with_call_ids(output.again(turn).shown, turn_name(turn.id))
                answered.append(Answered(turn, ids, output.num_reasoning, shown))
            call.committed(answered)
        except asyncio.CancelledError:
            self._fail(session, call, (), session.closed())
            raise
        except Exception as e:
            self._fail(session, call, (), e)

    async def count(self, session: Session, conversation: Conversation) -> int:
        """Tokens of the prompt that a turn would have."""
        return len((await self._prompts.make(session, conversation)).ids)

    def _fail(self, session: Session, call: Call, outputs: Sequence[Output], e: Exception) -> None:
        """Say so to whoever listens, and account for tokens that nobody will see."""
        if not isinstance(e, StenographError):
            log.error("bug while taking a turn", exc_info=e)
        num_tokens = sum(output.num_tokens for output in outputs)
        num_tokens += e.num_tokens if isinstance(e, Unsound) else 0
        if session.traced and num_tokens:
            aborted = isinstance(e, RequestError | Aborted)
            reason = "commit_failed" if isinstance(e, TraceError) else "aborted" if aborted else "engine_failed"
            try:
                self._store.drop(session.id, reason, num_tokens)
            except Exception:
                log.exception("session %s: %d tokens dropped (%s) could not be noted", session.id, num_tokens, reason)
        call.failed(e)

    # --- prepare -------------------------------------------------------------------------------------------------

    async def _prepare(self, session: Session, call: Call) -> tuple[Prompt, Sampling, tuple[str, ...]]:
        request, capabilities = call.request, self._engine.capabilities
        if request.grammar is not None and not capabilities.constrained:
            told = "this engine cannot constrain its output to a JSON schema"
            raise RequestError(f"{told}; leave out response_format (output_config.format, text.format)")
        prompt = await self._prompts.make(session, request.conversation)
        sampling, notes = resolve(request.asked, self._sampling, capabilities, len(prompt.ids))
        call.prepared(len(prompt.ids), self._names(session.id, prompt.ids, call.names))
        return prompt, replace(sampling, constrained=request.grammar is not None), request.notes + notes

    def _continued(self, session: Session, parent: str | None) -> Role | None:
        """What the turn that is gone on from was for."""
        if parent is None:
            return None
        turn = self._store.tree(session.id).turn(parent)
        return Role(turn.role, turn.role_evidence)

    # --- generate ------------------------------------------------------------------------------------------------

    def _outputs(self, call: Call, prompt: Prompt, sampling: Sampling) -> list[Output]:
        split = len(prompt.ids) - prompt.num_begun
        return [
            Output(
                self.rendering,
                prompt.ids[:split],
                prompt.asked,
                _seeded(sampling, choice),
                lambda delta, choice=choice: call.show(choice, delta),
                prompt.begun,
                prompt.ids[split:] if prompt.begun is not None else None,
            )
            for choice in range(call.request.num_choices)
        ]

    async def _generate(self, session: Session, call: Call, prompt: Prompt, outputs: Sequence[Output]) -> None:
        """Sample every choice; the first that fails ends the others."""
        requests = [
            Generate(
                ids=prompt.ids,
                sampling=output.sampling,
                session=session.id,
                turn=turn_id(name),
                stop_token_ids=self.rendering.stop_token_ids,
                conversation=call.request.conversation,
                grammar=call.request.grammar,
            )
            for name, output in zip(call.names, outputs, strict=True)
        ]
        if len(outputs) == 1:
            return await self._sample(requests[0], outputs[0])
        try:
            async with asyncio.TaskGroup() as group:
                for request, output in zip(requests, outputs, strict=True):
                    group.create_task(self._sample(request, output))
        except* Exception as e:
            raise e.exceptions[0] from None

    async def _sample(self, request: Generate, output: Output) -> None:
        chunks = checked(self._engine.generate(request), request.sampling.max_tokens, self._wants_experts)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._idle_timeout_s) as idle, aclosing(chunks):
                async for chunk in chunks:
                    if output.take(chunk):
                        break
                    idle.reschedule(loop.time() + self._idle_timeout_s)
        except TimeoutError as e:
            if await self._engine.is_paused():
                told = f"the engine has been paused for {self._idle_timeout_s:g} s; try again"
                raise EngineError(told, status=429, retry_after_s=_RETRY_AFTER_S) from e
            told = f"the engine sent nothing for {self._idle_timeout_s:g} s; is it alive? (gateway.idle_timeout_s)"
            raise EngineError(told, status=504) from e

    # --- commit --------------------------------------------------------------------------------------------------

    def _turns(
        self,
        session: Session,
        call: Call,
        prompt: Prompt,
        role: Role,
        notes: tuple[str, ...],
        outputs: Sequence[Output],
        seconds: float,
    ) -> tuple[list[Turn], list[Answered]]:
        """The siblings that answer the call, ready to be recorded, and what is told of each."""
        turns, answered = [], []
        for name, output in zip(call.names, outputs, strict=True):
            finished = output.finish()
            turn = Turn(
                id=turn_id(name),
                context_ids=prompt.context_ids,
                output_ids=output.ids,
                rollout_logprobs=output.logprobs,
                versions=tuple(output.versions),
                finish_reason=finished.finish_reason,
                ended_by=finished.ended_by,
                sampling=output.sampling,
                logprobs_mode=self._engine.capabilities.logprobs_mode,
                messages=prompt.messages,
                tools=prompt.asked.tools,
                reply=_with_call_ids(finished.reply, name),
                extends=prompt.extends,
                role=role.name,
                role_evidence=role.evidence,
                accepted=prompt.accepted,
                notes=notes + finished.notes,
                stopped_by=output.stopped_by,
                experts=self._kept(session, call, output),
                started_s=call.received_s,
                seconds=seconds,
                client_session=client_session(call.headers, call.request),
                num_instructions=call.request.num_instructions if call.request.store else None,
                request=call.key,
            )
            turns.append(turn)
            shown = _with_call_ids(finished.shown, name)
            answered.append(Answered(turn, prompt.ids, output.num_reasoning, shown))
        return turns, answered

    def _kept(self, session: Session, call: Call, output: Output) -> Payload | None:
        """The handle of what is heavy, held by the call until it is committed; nothing of an untraced turn is kept."""
        if not session.traced or (experts := output.experts) is None:
            return None
        with boundary(TraceError, "keep the turn's experts"):
            return self._store.payloads.put(experts, call.holder)


def _seeded(sampling: Sampling, choice: int) -> Sampling:
    """Choices of one request differ, and each is the same again."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + choice)


def _with_call_ids(reply: Reply, name: str) -> Reply:
    """Ids that name the turn, so that a call that comes back does."""
    calls = tuple(replace(call, id=call_id(name, n)) for n, call in enumerate(reply.tool_calls))
    return replace(reply, tool_calls=calls)
