"""The exception tree: every error says what, what was got, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class StenographError(Exception):
    """Root of everything that Stenograph raises on purpose."""


class ConfigError(StenographError):
    """The user's input is wrong; stops at start-up, names the field and the remedy."""


class RequestError(StenographError):
    """The agent's request is wrong; its dialect renders it as a 4xx.

    `code` is the protocol's machine-readable word where it has one; `retry` tells SDKs whether trying again can help;
    `headers` go out with it.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry = retry
        self.headers = headers or {}


class RolloutError(StenographError):
    """One attempt failed; recorded on the rollout, never fatal to its siblings."""


class EngineError(RolloutError):
    """The inference engine failed; `status` is the HTTP status that it answered or that fits."""

    def __init__(self, message: str, *, status: int = 500, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class ContextOverflow(EngineError):
    """The prompt leaves no room for output: `num_tokens` asked, `limit` allowed."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens, the context holds {limit}; shorten the conversation", status=400
        )
        self.num_tokens = num_tokens
        self.limit = limit


class EngineUnavailable(EngineError):
    """The engine cannot take requests now."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, status=503, retry_after_s=retry_after_s)


class TraceError(RolloutError):
    """A turn could not be recorded or read back."""


class TooManyRewards(TraceError):
    """More turns were given a reward than a session has."""

    def __init__(self, num_rewards: int, num_turns: int) -> None:
        told = f"{num_rewards} turn rewards were given, and the session has {num_turns} turns"
        super().__init__(f"{told}; give at most one a turn, in the order in which they were committed")


class UnknownSession(TraceError):
    """No session has this id, or it was released."""

    def __init__(self, session: str) -> None:
        super().__init__(f"unknown session {session}")


class OwnedElsewhere(TraceError):
    """Another process holds the session: the store that is `owner`, reached at `address` where it has one."""

    def __init__(self, session: str, owner: str, address: str) -> None:
        super().__init__(f"session {session} is held by another process; send the request again")
        self.session = session
        self.owner = owner
        self.address = address


class PayloadFreed(TraceError):
    """A heavy value went with its last lease."""


class AgentError(RolloutError):
    """The agent program could not be run to its end."""


class SandboxError(RolloutError):
    """The agent's sandbox failed."""


class JudgeError(RolloutError):
    """The judge raised, or answered something that is not a reward."""


class CheckpointError(StenographError):
    """A checkpoint could not be written or read."""


@contextmanager
def boundary(error: type[StenographError], action: str) -> Iterator[None]:
    """Attribute foreign exceptions raised in the block to `error`; ours and cancellation pass untouched."""
    try:
        yield
    except StenographError:
        raise
    except Exception as e:
        raise error(f"could not {action}: {type(e).__name__}: {e}") from e
