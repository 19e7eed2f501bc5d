"""Checkpoints are whole or absent, give back every bit of what was saved, and say in one line what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from stenograph.config import Config
from stenograph.errors import CheckpointError, ConfigError
from stenograph.rendering import builtin_tokenizer
from stenograph.training.checkpoints import (
    BATCH,
    STEP,
    LoopState,
    Origin,
    folder,
    found,
    load_loop,
    prune,
    remove_halves,
    save,
    whole_folder,
)
from stenograph.training.critic import critic_from_actor
from stenograph.training.trainer import Trainer
from support.models import perturb, tiny_model
from support.samples import random_groups

STATE = LoopState(step=3, engine=b"\x00\xffrandom")


def ppo(**training: Any) -> Config:
    settings = {"num_threads": 1, "device": "cpu", "lr": 1e-3, "steps": 10, "lr_schedule": "linear", **training}
    return Config.model_validate(
        {"algorithm": {"estimator": "gae"}, "critic": {"lr": 1e-3, "lr_warmup": 4}, "training": settings}
    )


def make_trainer(config: Config | None = None, *, seed: int = 0) -> Trainer:
    model = tiny_model(seed=seed)
    config = config or ppo()
    critic = critic_from_actor(model, seed=1) if config.algorithm.has_critic else None
    return Trainer(model, config, critic=critic)


def own(path: Path) -> Origin:
    return Origin(path, is_own=True)


def restored(origin: Origin, config: Config | None = None) -> Trainer:
    """Another trainer, whose models have other weights, that begins with a checkpoint."""
    trainer = make_trainer(config, seed=9)
    origin.load_actor(trainer.model, trainer._config.model)
    if trainer.critic is not None:
        perturb(trainer.critic)
        origin.load_critic(trainer.critic, trainer._config.model)
    origin.load_training(trainer)
    return trainer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """A checkpoint after two steps, and the trainer that it is of."""
    trainer = make_trainer()
    for seed in (0, 1):
        trainer.step(random_groups(seed))
    trainer.phases.enter("publish")
    trainer.phases.enter("rollout")
    path = folder(tmp_path_factory.mktemp("run"), STEP, 3)
    save(path, trainer, STATE, builtin_tokenizer())
    return path, trainer


@pytest.fixture
def copied(made: tuple[Path, Trainer], tmp_path: Path) -> Path:
    path = folder(tmp_path, STEP, 3)
    shutil.copytree(made[0], path)
    return path


def bits(trainer: Trainer) -> dict[str, bytes]:
    assert trainer.critic is not None
    tensors = {f"{of}.{name}": t for of in ("model", "critic") for name, t in getattr(trainer, of).state_dict().items()}
    for of, updates in trainer.updates.items():
        for n, moments in enumerate(updates.optimizer_state()["state"]):
            tensors |= {f"{of}.{n}.{name}": t for name, t in moments.items()}
    return {name: t.contiguous().numpy().tobytes() for name, t in tensors.items()}


def test_a_trainer_goes_on_from_a_checkpoint_to_the_bit(made: tuple[Path, Trainer]) -> None:
    path, trainer = made
    again = restored(own(path))
    assert load_loop(path) == STATE
    assert bits(again) == bits(trainer)
    assert again.state() == trainer.state()
    assert {name: u.lr for name, u in again.updates.items()} == {name: u.lr for name, u in trainer.updates.items()}
    third = random_groups(2)
    reports = [one.step(third).row() for one in (make_copy(trainer, path), again)]
    assert reports[0] | {"seconds": 0} == reports[1] | {"seconds": 0}


def make_copy(trainer: Trainer, path: Path) -> Trainer:
    """The trainer, put aside: the fixture's own is not to move."""
    other = restored(own(path))
    assert bits(other) == bits(trainer)
    return other


def test_actor_and_critic_are_exports(made: tuple[Path, Trainer]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, trainer = made
    assert {one.name for one in path.iterdir()} == {"actor", "critic", "state"}
    actor = AutoModelForCausalLM.from_pretrained(path / "actor")
    assert all(torch.equal(a, b) for a, b in zip(actor.parameters(), trainer.model.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(path / "actor").get_vocab() == builtin_tokenizer().get_vocab()
    assert json.loads((path / "critic" / "config.json").read_text())["value_head"] is True


def test_nothing_is_saved_amid_a_step(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.step(random_groups())
    with pytest.raises(CheckpointError, match="amid a step"):
        save(folder(tmp_path, STEP, 1), trainer, STATE, builtin_tokenizer())
    assert found(tmp_path, STEP) == []


# --- whole or absent -------------------------------------------------------------------------------------------------

WRITER = """
import os
import resource
import signal
import sys
import warnings
from pathlib import Path
from stenograph.training.checkpoints import whole_folder
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
for limit in range(0, 700, 100):
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with whole_folder(Path(sys.argv[1]) / "checkpoints" / f"step-{limit:06d}") as work:
            for size in (50, 250, 550):
                with (work / str(size)).open("wb") as file:
                    for _ in range(size):
                        file.write(b"x")
                        file.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_a_writer_that_is_killed_at_any_byte_leaves_nothing_that_is_found(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], check=True, timeout=60)
    assert found(tmp_path, STEP) == [600]
    assert {one.name: one.stat().st_size for one in folder(tmp_path, STEP, 600).iterdir()} == {
        "50": 50,
        "250": 250,
        "550": 550,
    }
    assert len(list((tmp_path / "checkpoints").glob(".*"))) == 6
    remove_halves(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [folder(tmp_path, STEP, 600)]


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = folder(tmp_path, STEP, 1)
    with whole_folder(path) as work:
        (work / "a").write_text("first")
    with pytest.raises(CheckpointError, match=f"could not write {path}: ZeroDivisionError"):
        fail_to_write(path)
    assert (path / "a").read_text() == "first"
    with whole_folder(path) as work:
        (work / "b").write_text("third")
    assert [one.name for one in path.iterdir()] == ["b"]
    assert list(path.parent.iterdir()) == [path]


def fail_to_write(path: Path) -> None:
    with whole_folder(path) as work:
        (work / "a").write_text("second")
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("steps", "keep", "left", "batches"),
    [
        ([], 2, [], [1, 2, 3, 4, 5, 6, 7]),
        ([2], 2, [2], [1, 2, 3, 4, 5, 6, 7]),  # the beginning is the one before
        ([2], 1, [2], [3, 4, 5, 6, 7]),
        ([2, 4], 2, [2, 4], [3, 4, 5, 6, 7]),
        ([0, 2, 4, 6], 2, [4, 6], [5, 6, 7]),
        ([2, 4, 6], 9, [2, 4, 6], [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_newest_checkpoints_stay_with_the_batches_behind_the_oldest_of_them(
    tmp_path: Path, steps: list[int], keep: int, left: list[int], batches: list[int]
) -> None:
    for kind, numbers in ((STEP, steps), (BATCH, range(1, 8))):
        for number in numbers:
            folder(tmp_path, kind, number).mkdir(parents=True)
    gone: list[str] = []
    prune(tmp_path, keep, gone.append)
    assert (found(tmp_path, STEP), found(tmp_path, BATCH)) == (left, batches)
    assert gone == [f"batch-{n:06d}" for n in range(1, 8) if n not in batches]


# --- torn and damaged ------------------------------------------------------------------------------------------------


def without(file: Path, *names: str) -> None:
    if file.suffix == ".json":
        held = json.loads(file.read_text())
        file.write_text(json.dumps({name: held[name] for name in held.keys() - names}))
    else:
        held = torch.load(file)
        torch.save({name: held[name] for name in held.keys() - names}, file)


def test_a_checkpoint_from_before_a_field_warns_and_goes_on_with_the_default(copied: Path) -> None:
    without(copied / "state" / "loop.json", "engine")
    with pytest.warns(UserWarning, match=r"loop\.json was written before it had engine; going on with ''"):
        assert load_loop(copied) == LoopState(3, b"")
    without(copied / "state" / "trainer.json", "beta")
    with pytest.warns(UserWarning, match="beta"):
        assert restored(own(copied)).num_steps == 2
    without(copied / "state" / "critic.pt", "schedule")
    without(copied / "state" / "trainer.json", "num_steps", "version", "is_critic_warm")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = restored(own(copied))
    assert any("critic.pt was written before it had schedule" in str(one.message) for one in told)
    assert (trainer.updates["critic"].applied, trainer.updates["actor"].applied) == (0, 2)


DAMAGED = ["actor/model.safetensors", "critic/model.safetensors", "state/actor.pt", "state/trainer.json"]


@pytest.mark.parametrize("how", ["cut", "missing"])
@pytest.mark.parametrize("file", DAMAGED)
def test_a_damaged_checkpoint_says_where_and_what_to_do(copied: Path, file: str, how: str) -> None:
    path = copied / file
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        path.unlink()
    with pytest.raises(CheckpointError) as raised:
        restored(own(copied))
    assert str(copied / file.split("/")[0]) in str(raised.value)
    assert "take the one before" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("file", ["state/actor.pt", "state/trainer.json"])
def test_what_can_be_read_and_is_no_state_is_damage_too(copied: Path, file: str) -> None:
    if file.endswith(".json"):
        (copied / file).write_text("[]")
    else:
        torch.save([], copied / file)
    with pytest.raises(CheckpointError, match=f"{file} is damaged .* take the one before"):
        restored(own(copied))


def test_a_checkpoint_without_the_loop_is_damaged(copied: Path) -> None:
    (copied / "state" / "loop.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"loop\.json is damaged .* take the one before"):
        load_loop(copied)


def test_a_checkpoint_of_another_model_is_refused(copied: Path) -> None:
    trainer = Trainer(tiny_model(300), Config.model_validate({"training": {"device": "cpu"}}))
    with pytest.raises(CheckpointError, match=r"of another model: .* is \(307, 64\) there, and \(300, 64\) here"):
        Origin(copied).load_actor(trainer.model, trainer._config.model)


# --- a part of one ---------------------------------------------------------------------------------------------------


def test_the_parts_that_are_chosen_are_loaded_and_no_others(made: tuple[Path, Trainer]) -> None:
    path, trainer = made
    whole, fresh = bits(trainer), bits(restored(Origin(path, frozenset())))
    moments = {name for name in whole if name.split(".")[1].isdigit()}
    for parts in ({"weights"}, {"optimizer"}, {"schedule"}, {"weights", "optimizer"}):
        begun = restored(Origin(path, frozenset(parts)))
        now = bits(begun)
        is_loaded = {name: now.get(name) == value for name, value in whole.items()}
        assert all(is_loaded[name] == ("optimizer" in parts) for name in moments)
        assert all(is_loaded[name] == ("weights" in parts) for name in whole.keys() - moments if name in fresh)
        assert begun.updates["actor"].applied == (2 if "schedule" in parts else 0)
        assert begun.num_steps == 0


def test_a_critic_is_left_out_where_one_of_the_two_has_none(copied: Path, made: tuple[Path, Trainer]) -> None:
    grpo = Config.model_validate({"training": {"device": "cpu", "num_threads": 1}})
    begun = restored(Origin(copied), grpo)
    assert begun.updates["actor"].applied == 2
    shutil.rmtree(copied / "critic")
    (copied / "state" / "critic.pt").unlink()
    begun = restored(Origin(copied))
    assert (begun.updates["actor"].applied, begun.updates["critic"].applied) == (2, 0)
    with pytest.raises(CheckpointError, match="critic"):
        restored(own(copied))


def test_a_run_stands_for_its_newest_checkpoint(made: tuple[Path, Trainer], copied: Path) -> None:
    shutil.copytree(copied, folder(copied.parents[1], STEP, 2))
    assert Origin.chosen(copied.parents[1], "weights, schedule") == Origin(copied, frozenset({"weights", "schedule"}))
    assert Origin.chosen(copied, "weights") == Origin(copied, frozenset({"weights"}))


def test_what_cannot_be_begun_with_is_one_line(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--load wheights: parts of a checkpoint are weights, optimizer, schedule"):
        Origin.chosen(copied, "wheights")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="neither a checkpoint nor a run that has one"):
        Origin.chosen(tmp_path / "nothing", "weights")
    shutil.rmtree(copied / "state")
    assert Origin.chosen(copied, "weights").checkpoint == copied
    with pytest.raises(ConfigError, match="an export without optimizer"):
        Origin.chosen(copied, "weights,optimizer")
