"""The one composition root: a gateway alone, or a gateway, agents and a trainer around one engine."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import re
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stenograph.agents import Agent, load_agent
from stenograph.config import Config
from stenograph.engines.base import Engine
from stenograph.errors import CheckpointError, ConfigError
from stenograph.gateway.forwarding import private_address
from stenograph.gateway.server import Gateway, new_admin_key
from stenograph.judges import Judge, load_judge
from stenograph.models import load_model, resolve_model
from stenograph.rendering import Rendering, load_rendering, load_tokenizer
from stenograph.rollouts import Attempts, GatewayClient
from stenograph.rundir import JOURNAL, RunDir, written
from stenograph.tasks import load_tasks
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.traces.store import TraceStore
from stenograph.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from stenograph.engines.vllm import VllmEngine
    from stenograph.loop import Loop
    from stenograph.training.checkpoints import Origin
    from stenograph.training.critic import ValueModel
    from stenograph.training.trainer import Trainer
    from stenograph.watching import Watcher

T = TypeVar("T")


async def serve(config: Config, listening: Callable[[str, str], None], sockets: Sequence[socket.socket] = ()) -> None:
    """Run a gateway until SIGINT or SIGTERM; `listening` is called with its URL and admin key when it takes requests.

    It listens at `sockets` where they are given.
    """
    rendering = load_rendering(config.model)
    model = None
    if config.engine.kind == "local":
        model = load_model(config.model, dtype=config.engine.dtype)
    engine = await build_engine(config, rendering, model)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):  # only now: what loads a model or looks for one does not see them
        loop.add_signal_handler(name, stopped.set)
    try:
        with _recording(config, rendering, _serving_folder(config)) as store:
            async with _listening(config, engine, rendering, store, sockets) as gateway:
                _keep_for_good()
                listening(gateway.url, gateway.admin_key)
                await stopped.wait()
    finally:
        await engine.aclose()


async def train(
    config: Config,
    folder: Path,
    watcher: Watcher,
    changed: Callable[[int], None],
    *,
    resumes: bool = False,
    origin: Origin | None = None,
) -> Loop:
    """Train as `config` says, into `folder`: a run that `resumes` goes on in its own, another needs a new one.

    A new run may have an `origin`. What can be checked is, before anything heavy is imported or written.
    Raises ConfigError for what is wrong with the config, StenographError where the run fails.
    """
    if not resumes:
        RunDir.check(folder)
    work = _work(config)
    watcher.phase("loading the model")
    resolve_model(config.model)

    from stenograph.accounts import Accounts
    from stenograph.loop import Loop
    from stenograph.resuming import Resumption, account_for_dead, resumption
    from stenograph.training.checkpoints import begin
    from stenograph.watching import Spans, Watchers, boards

    rendering = load_rendering(config.model)
    async with AsyncExitStack() as stack:
        run, goes_on = RunDir(folder), Resumption(origin)
        if resumes:
            stack.enter_context(run.locked())
            goes_on = resumption(run)
        trainer = _trainer(config, goes_on.origin)
        trainer.phases.enter("publish")  # so that the engine finds the actor on the device that it is to serve it from
        engine = await build_engine(config, rendering, trainer.model)
        stack.push_async_callback(engine.aclose)
        trainer.phases.enter("rollout")
        if resumes:
            run.reopen(config)
        else:
            RunDir.create(folder, config)
            if origin is not None and config.training.checkpoint_every:
                watcher.phase("saving")
                begin(folder, trainer, load_tokenizer(config.model))
            stack.enter_context(run.locked())  # from here on it can be resumed, and its beginning is there
        store = stack.enter_context(_recording(config, rendering, folder))
        watchers = Watchers(watcher, Spans(run), *stack.enter_context(boards(run)))
        accounts = Accounts(run, store, config.select, watchers)
        if resumes and isinstance(store, SqliteTraceStore):
            account_for_dead(store, store.path, accounts, goes_on.batches)
        on_engine, client = await stack.enter_async_context(_reached(config, engine, rendering, store))
        loop = Loop(
            config=config,
            run=run,
            engine=engine,
            on_engine=on_engine,
            store=store,
            trainer=trainer,
            attempts=Attempts(client, work.agent, work.judge, config.rollouts.max_concurrent, changed),
            tasks=work.tasks,
            held_out=work.held_out,
            dtypes=_dtypes(config),
            watcher=watchers,
            accounts=accounts,
            state=goes_on.state,
            rolled_out=goes_on.batches,
        )
        await loop.train()
        return loop


@dataclass(frozen=True, slots=True)
class _Work:
    """Who does what, and who scores it."""

    agent: Agent
    judge: Judge
    tasks: list[Task]
    held_out: list[Task]


def _work(config: Config) -> _Work:
    if config.engine.kind == "vllm":
        raise ConfigError('engine.kind = "vllm" cannot be given new weights: set engine.kind = "local" to train')
    if config.gateway.num_processes > 1:
        raise ConfigError("gateway.num_processes is of steno serve; steno train has one gateway: set it to 1")
    if config.model.dtype == "float16":  # the second moments of gradients below 0.01 are 0 in it, and steps boundless
        told = 'model.dtype = "float16" is too coarse for an optimizer\'s moments'
        raise ConfigError(f'{told}: set model.dtype = "float32", and training.autocast = "bfloat16" for speed')
    agent, judge = load_agent(config.agent), load_judge(config.judge)
    tasks = load_tasks(config.tasks)
    evaluation = config.evaluation
    held_out = load_tasks(evaluation.tasks, "evaluation.tasks")[: evaluation.max_tasks] if evaluation.every else []
    return _Work(agent, judge, tasks, held_out)


@asynccontextmanager
async def _reached(
    config: Config, engine: Engine, rendering: Rendering, store: TraceStore
) -> AsyncIterator[tuple[Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]], GatewayClient]]:
    """A gateway on a loop of its own: how to call the engine there, and a client of it."""
    async with LoopThread() as thread, thread.entered(lambda: _listening(config, engine, rendering, store)) as gateway:
        url = config.gateway.public_url or gateway.url
        async with GatewayClient(url, gateway.admin_key, model=gateway.model_name) as client:
            yield thread.run, client


def _trainer(config: Config, origin: Origin | None) -> Trainer:
    """The trainer and the models that `config` asks for, as far as `origin` goes as they are there.

    Raises ConfigError, CheckpointError where one is missing.
    """
    import torch

    from stenograph.training.critic import critic_from_actor, load_critic
    from stenograph.training.trainer import Trainer

    actor, critic, reference = load_model(config.model), None, None
    if origin is not None:
        origin.load_actor(actor, config.model)
    if config.algorithm.has_critic and config.critic.path is not None:
        try:
            critic = load_critic(
                Path(config.critic.path).expanduser(),
                dtype=getattr(torch, config.model.dtype),
                trust_remote_code=config.model.trust_remote_code,
            )
        except CheckpointError as e:
            raise ConfigError(f"critic.path: {e}") from e
        _check_vocabulary(critic, config)
    elif config.algorithm.has_critic:
        critic = critic_from_actor(actor, seed=config.training.seed)
    if critic is not None and origin is not None:
        origin.load_critic(critic, config.model)
    if config.algorithm.kl.placement != "none":
        reference = load_model(config.model)
    trainer = Trainer(actor, config, critic=critic, reference=reference)
    if origin is not None:
        origin.load_training(trainer)
    return trainer


def _check_vocabulary(critic: ValueModel, config: Config) -> None:
    """Raises ConfigError for a critic that has no embedding of some token of the actor's."""
    known, needed = critic.config.get_text_config().vocab_size, len(load_tokenizer(config.model))
    if known < needed:  # more is usual: models of a family pad theirs to sizes of their own
        raise ConfigError(
            f"critic.path: {config.critic.path!r} knows {known} tokens, and the tokenizer of model.path has {needed}; "
            "give the critic of a model that has the same tokenizer"
        )


async def build_engine(config: Config, rendering: Rendering, model: PreTrainedModel | None) -> Engine:
    """The engine that `config` names, serving `model` or a copy of it.

    Raises EngineError where it cannot be had, ConfigError where it is not the engine of `config`'s model.
    """
    if config.engine.kind == "vllm":
        from stenograph.engines.vllm import VllmEngine

        engine = await VllmEngine.connect(config.engine)
        try:
            await _check_tokenizer(config, engine, rendering)
        except BaseException:
            await engine.aclose()
            raise
        return engine
    if config.engine.kind == "scripted":
        from stenograph.engines.scripted import ScriptedEngine, load_script

        assert config.engine.script is not None  # the config's validator saw to it
        lines = load_script(config.engine.script, rendering)
        return ScriptedEngine(lines, context_length=config.engine.context_length or 1_000_000)
    from stenograph.engines.local import LocalEngine

    assert model is not None
    return LocalEngine(model, config.engine, seed=config.training.seed)


# A little of what tokenizers differ in: words, digits, accents, other scripts, white space, code.
_PROBE = (
    "Hello there, naïve wörld: 31415 + 2.71828 = 你好 мир 🙂\n\n\tdef f(x):\n        return x['key'] != None  # ok?"
)


async def _check_tokenizer(config: Config, engine: VllmEngine, rendering: Rendering) -> None:
    """Raises ConfigError where the server gives a text other ids than `rendering` does: it would read nonsense."""
    theirs = await engine.tokenize(_PROBE)
    if theirs is not None and theirs != rendering.encode_text(_PROBE).tolist():
        raise ConfigError(
            f"model.path: {config.model.path!r} has another tokenizer than {engine.model!r} at {engine.server}; "
            "set model.path to the model that this server was started with"
        )


@asynccontextmanager
async def _listening(
    config: Config,
    engine: Engine,
    rendering: Rendering,
    store: TraceStore,
    sockets: Sequence[socket.socket] = (),
) -> AsyncIterator[Gateway]:
    address = store.address if isinstance(store, SqliteTraceStore) else ""
    gateway = Gateway(
        config, engine, rendering, store, new_admin_key(), config.model.path or "stenograph", address=address
    )
    _allow_connections()
    await gateway.start(sockets)
    try:
        yield gateway
    finally:
        await gateway.stop()


_MAX_FILES = 2**16  # not all that may be allowed: there are programs that close each one before they start another


def _allow_connections() -> None:
    """A stream takes two files, its client's connection and the engine's; what a process may open at first is 1024."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if most == resource.RLIM_INFINITY else min(most, _MAX_FILES)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _keep_for_good() -> None:
    """Nothing that is there by now goes away again. A look through all of it for garbage holds every stream up."""
    gc.collect()
    gc.freeze()


def _dtypes(config: Config) -> dict[str, str]:
    """The precisions that sampled and trained log-probabilities come from."""
    trainer = config.model.dtype + (f", autocast {config.training.autocast}" if config.training.autocast else "")
    engine = "none" if config.engine.kind == "scripted" else config.engine.dtype or config.model.dtype
    return {"engine_dtype": engine, "trainer_dtype": trainer}


class LoopThread:
    """An event loop on a thread of its own: `await loop.run(coroutine)` from another loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stenograph-gateway")

    async def __aenter__(self) -> LoopThread:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @asynccontextmanager
    async def entered(self, make: Callable[[], Any]) -> AsyncIterator[Any]:
        """Enter and leave an async context manager on this loop."""
        context = make()
        entered = await self.run(context.__aenter__())
        try:
            yield entered
        finally:
            await self.run(context.__aexit__(None, None, None))


@contextmanager
def _recording(config: Config, rendering: Rendering, folder: Path) -> Iterator[TraceStore]:
    """The store that `config` names; its journal is in `folder` unless a path is given."""
    settings = config.store
    allowed = [name for name, is_on in config.matching.model_dump().items() if is_on]
    if settings.kind == "memory":
        with closing(MemoryTraceStore(allowed)) as memory:
            yield memory
        return
    with private_address() as address:
        store = SqliteTraceStore(
            settings.path or folder / JOURNAL,
            allowed,
            keep=settings.keep,
            idle_s=settings.idle_s,
            memory_bytes=settings.max_memory_mb * 2**20 if settings.max_memory_mb else math.inf,
            address=address,
        )
        with closing(store):
            store.begin(written(config), hashlib.sha256(rendering.encode_text(_PROBE).tobytes()).hexdigest())
            yield store


def _serving_folder(config: Config) -> Path:
    """Where a gateway alone keeps what it records: by its model, for another one's ids would mean nothing in it."""
    name = re.sub(r"[^\w.-]+", "-", config.model.path or config.engine.kind).strip("-.")
    return Path("runs") / f"serve-{name}"
