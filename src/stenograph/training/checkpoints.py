"""A checkpoint is a folder that is there whole, every byte of it on disk, or not at all."""

from __future__ import annotations

import base64
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stenograph.config import ModelConfig
from stenograph.errors import CheckpointError, ConfigError, StenographError, boundary
from stenograph.models import load_model
from stenograph.training.critic import ValueModel, load_critic
from stenograph.training.trainer import Trainer
from stenograph.training.weights import ModelWeights, save_model

PARTS = ("weights", "optimizer", "schedule")  # of a checkpoint that another run may begin with
STEP, BATCH = "step", "batch"  # kinds of folders in a run's `checkpoints`


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where the training loop stands."""

    step: int = 0  # steps that are done; the place in the order of tasks follows from it
    engine: bytes = b""  # its random state; empty: it draws from the seed on


BEGINNING = LoopState()


# --- folders ---------------------------------------------------------------------------------------------------------


def folder(run: Path, kind: str, step: int) -> Path:
    return run / "checkpoints" / f"{kind}-{step:06d}"


def found(run: Path, kind: str) -> list[int]:
    """The steps of which `run` has a whole folder of this kind, oldest first."""
    names = [path.name for path in (run / "checkpoints").glob(f"{kind}-*")]
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(rf"{kind}-(\d+)", name)))


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill: it is at `path`, in place of what was there, once the block has succeeded.

    Raises CheckpointError where it cannot be written.
    """
    work = path.with_name(f".{path.name}.part")
    with boundary(CheckpointError, f"write {path}"):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            yield work
            for inside, _, files in os.walk(work):
                for name in (*files, "."):
                    _sync(Path(inside, name))
            shutil.rmtree(path, ignore_errors=True)
            work.rename(path)
            _sync(path.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_halves(run: Path) -> None:
    """Remove what writers that were killed have left of checkpoints."""
    for path in (run / "checkpoints").glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


def prune(run: Path, keep: int, released: Callable[[str], None]) -> None:
    """Keep the newest `keep` checkpoints, and the batches behind the oldest of them.

    So where the newest turns out to be damaged, the one before still leads to where the run was. The beginning counts
    as a checkpoint. `released` is told the name of each batch before it goes.
    """
    steps = found(run, STEP)
    oldest = sorted({0, *steps})[-keep:][0]
    for step in found(run, BATCH):
        if step <= oldest:
            gone = folder(run, BATCH, step)
            released(gone.name)
            shutil.rmtree(gone)
    for step in steps:
        if step < oldest:
            shutil.rmtree(folder(run, STEP, step))


# --- writing ---------------------------------------------------------------------------------------------------------


def save(path: Path, trainer: Trainer, loop: LoopState, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write a checkpoint to `path`. Raises CheckpointError where it cannot be written."""
    trainer.phases.check_save()
    with whole_folder(path) as whole:
        save_actor(whole / "actor", trainer, tokenizer)
        if trainer.critic is not None:
            save_model(trainer.critic, whole / "critic")
        state = whole / "state"
        state.mkdir()
        for name, updates in trainer.updates.items():
            held = {"optimizer": updates.optimizer_state(), "schedule": updates.schedule_state()}
            torch.save(held, state / f"{name}.pt")
        _write_json(state / "trainer.json", trainer.state())
        _write_json(state / "loop.json", {"step": loop.step, "engine": base64.b64encode(loop.engine).decode()})


def begin(run: Path, trainer: Trainer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Keep what a run begins with: it does not follow from its configuration."""
    save(folder(run, STEP, 0), trainer, BEGINNING, tokenizer)


def save_actor(path: Path, trainer: Trainer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Export the actor for Hugging Face, with its tokenizer and chat template, so that it can be served."""
    trainer.save_actor(path)
    tokenizer.save_pretrained(path)


def _write_json(path: Path, held: Mapping[str, Any]) -> None:
    path.write_bytes(orjson.dumps(held, option=orjson.OPT_INDENT_2))


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """The checkpoint that a trainer begins with, and which parts of it.

    Where its own run goes on (`is_own`), all of it, which has to be there. Another's critic is left out where one of
    the two has none. Methods raise CheckpointError for what is damaged or another model's.
    """

    checkpoint: Path
    parts: frozenset[str] = frozenset(PARTS)
    is_own: bool = False

    @classmethod
    def chosen(cls, path: Path, words: str) -> Origin:
        """Parts (`words`, with commas between) of the checkpoint at `path`, or a run's newest. Raises ConfigError."""
        parts = frozenset(word.strip() for word in words.split(","))
        if unknown := parts - set(PARTS):
            raise ConfigError(f"--load {', '.join(sorted(unknown))}: parts of a checkpoint are {', '.join(PARTS)}")
        checkpoint = path
        if not (path / "actor").is_dir():
            if not (steps := found(path, STEP)):
                told = f"--init-from {path} is neither a checkpoint nor a run that has one"
                raise ConfigError(f"{told}; give RUN/checkpoints/step-N, or RUN")
            checkpoint = folder(path, STEP, steps[-1])
        if parts != {"weights"} and not (checkpoint / "state").is_dir():
            missing = ", ".join(sorted(parts - {"weights"}))
            raise ConfigError(
                f"{checkpoint} is an export without {missing}; give a whole checkpoint, or --load weights"
            )
        return cls(checkpoint, parts)

    def load_actor(self, actor: PreTrainedModel, config: ModelConfig) -> None:
        """Fill it with the weights, in its own precision."""
        if "weights" in self.parts:
            path = self.checkpoint / "actor"
            with reading(path):
                source = ModelConfig(path=str(path), trust_remote_code=config.trust_remote_code)
                loaded = load_model(source, dtype=actor.dtype)
            _fill(actor, loaded, path)

    def load_critic(self, critic: ValueModel, config: ModelConfig) -> None:
        """Likewise."""
        if "weights" in self.parts and (self.is_own or self._has_critic):
            path = self.checkpoint / "critic"
            with reading(path):
                loaded = load_critic(path, dtype=critic.dtype, trust_remote_code=config.trust_remote_code)
            _fill(critic, loaded, path)

    def load_training(self, trainer: Trainer) -> None:
        """All but the weights."""
        for name, updates in trainer.updates.items():
            if self.parts != {"weights"} and (self.is_own or name == "actor" or self._has_critic):
                file = self.checkpoint / "state" / f"{name}.pt"
                with reading(file):
                    held = torch.load(file, map_location="cpu", weights_only=True)
                    held = _known(held, {"optimizer": {}, "schedule": {}}, file)
                if "optimizer" in self.parts:
                    updates.load_optimizer(held["optimizer"])
                if "schedule" in self.parts:
                    updates.load_schedule(held["schedule"])
        if self.is_own:
            file = self.checkpoint / "state" / "trainer.json"
            with reading(file):
                trainer.load_state(orjson.loads(file.read_bytes()))

    @property
    def _has_critic(self) -> bool:
        return (self.checkpoint / "critic").is_dir()


def load_loop(path: Path) -> LoopState:
    file = path / "state" / "loop.json"
    with reading(file):
        step = int(path.name.removeprefix(f"{STEP}-"))
        held = _known(orjson.loads(file.read_bytes()), {"step": step, "engine": ""}, file)
        return LoopState(held["step"], base64.b64decode(held["engine"]))


def _known(held: Mapping[str, Any], defaults: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """`held`, and the default of whatever it was written too early to have."""
    for name in defaults.keys() - held.keys():
        warnings.warn(f"{file} was written before it had {name}; going on with {defaults[name]!r}", stacklevel=3)
    return {**defaults, **held}


_TAKE_ANOTHER = "remove its checkpoint, and take the one before"


@contextmanager
def reading(path: Path, remedy: str = _TAKE_ANOTHER) -> Iterator[None]:
    """Whatever fails inside is damage at `path`, and raises CheckpointError."""
    try:
        yield
    except Exception as e:
        reason = str(e).strip().partition("\n")[0]
        told = reason if isinstance(e, StenographError) else f"{type(e).__name__}: {reason}"
        raise CheckpointError(f"{path} is damaged ({told}); {remedy}") from e


def _fill(model: PreTrainedModel, loaded: PreTrainedModel, path: Path) -> None:
    own, theirs = dict(ModelWeights(model).tensors()), dict(ModelWeights(loaded).tensors())
    for name in sorted(own.keys() | theirs.keys()):
        shapes = [tuple(some[name].shape) if name in some else None for some in (theirs, own)]
        if shapes[0] != shapes[1]:
            told = f"{path} is of another model: {name} is {shapes[0]} there, and {shapes[1]} here"
            raise CheckpointError(f"{told}; give a checkpoint of model.path")
    with torch.no_grad():
        for name, tensor in theirs.items():
            own[name].copy_(tensor)
