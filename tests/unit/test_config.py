"""Settings come from the command line, the environment, the file, the defaults; each is checked, and each is read."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

import stenograph
from stenograph import config as settings
from stenograph import config_training
from stenograph.config import Config
from stenograph.config_loading import load_config
from stenograph.errors import ConfigError
from stenograph.progress import Progress
from stenograph.run import train
from stenograph.rundir import RunDir

ROOT = Path(stenograph.__file__).parent
EXAMPLE = ROOT.parents[1] / "examples" / "arithmetic"


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("STENO_")]:
        monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text)
    return file


# Precedence


def test_the_command_line_comes_before_the_environment_before_the_file_before_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "[training]\nlr = 0.2\nsteps = 2\nseed = 2\n")
    monkeypatch.setenv("STENO_TRAINING__LR", "0.3")
    monkeypatch.setenv("STENO_TRAINING__STEPS", "3")
    training = load_config(file, ["training.lr=0.4"]).training
    assert (training.lr, training.steps, training.seed, training.num_epochs) == (0.4, 3, 2, 1)
    assert load_config(file).training.lr == 0.3
    monkeypatch.delenv("STENO_TRAINING__LR")
    assert load_config(file).training.lr == 0.2
    assert load_config().training.lr == Config().training.lr


def test_the_last_override_counts() -> None:
    assert load_config(None, ["training.steps=2", "training.steps=3"]).training.steps == 3


def test_environment_and_overrides_leave_the_rest_of_a_section_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "[sampling.force]\ntemperature = 0.5\ntop_p = 0.5\ntop_k = 5\n")
    monkeypatch.setenv("STENO_SAMPLING__FORCE__TOP_P", "0.6")
    force = load_config(file, ["sampling.force.top_k=7"]).sampling.force
    assert (force.temperature, force.top_p, force.top_k) == (0.5, 0.6, 7)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('agent.command=["a b", "c"]', ("a b", "c")),
        ("agent.command=[]", ()),
    ],
)
def test_a_value_is_toml(override: str, expected: object) -> None:
    assert load_config(None, [override]).agent.command == expected


def test_a_value_that_is_no_toml_is_a_text() -> None:
    assert load_config(None, ["model.path=some/folder=x"]).model.path == "some/folder=x"
    assert load_config(None, ['model.path="quoted"']).model.path == "quoted"


def test_our_own_environment_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's key, and what an agent is told, begin with the same letters."""
    for name in ("STENO_ADMIN_KEY", "STENO_TASK", "STENO_ANSWER", "STENO_TRAINING__LR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("STENO_ADMIN_KEY", "secret")
    assert load_config() == Config()


# Refusals: one line that names where, what and the remedy


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[training]\nlerning = 1\n", r"config\.toml: unknown setting 'training\.lerning'; known here: autocast, "),
        ("[trainin]\n", r"unknown setting 'trainin'; known here: agent, algorithm, "),
        ("[sampling.force]\ntemp = 1\n", r"unknown setting 'sampling\.force\.temp'; known here: frequency_penalty"),
        ("[evaluation.tasks]\nfile = 'x'\n", r"unknown setting 'evaluation\.tasks\.file'; known here: callable"),
        ("[training]\nlr = -1\n", r"training\.lr: .*greater than 0, got -1"),
        ("[training]\nlr = 'fast'\n", r"training\.lr: .*, got 'fast'"),
        ("[training]\nrecord = 'some'\n", r"training\.record: .*, got 'some'"),
        ("[engine]\nkind = 'magic'\n", r"engine\.kind: .*, got 'magic'"),
        ("training = 3\n", r"training: .*, got 3"),
        ("evaluation = 3\n", r"evaluation: .*, got 3"),
        ("agent = 3\n", r"agent: .*, got 3"),
        ("[sft]\nlr = 1\n", r"sft: supervised fine-tuning is not mixed into reinforcement learning; fine-tune first"),
        ("[training]\nsft_weight = 1\n", r"training\.sft_weight: supervised fine-tuning is not mixed into"),
        ("[algorithm]\npolicy_loss = 'sft'\n", r"algorithm\.policy_loss: supervised fine-tuning is not mixed into"),
        ("[algorithm]\nlam = 0.9\n", r"nothing reads lam; set estimator = \"gae\""),
        ("[critic]\nlr = 1\n", r"\[critic\] is of algorithm.estimator = \"gae\", and 'grpo' has none"),
        ("[algorithm.kl]\nbeta = 1\n", r"nothing reads beta; set placement = \"reward\" or \"loss\""),
        ("[algorithm.kl]\nplacement = 'reward'\n", r"needs rewards of tokens: set estimator = \"gae\""),
        ("[algorithm.kl]\nplacement = 'loss'\nkind = 'k1'\n", r"expected gradient of 0 in the loss; use \"k2\""),
        ("[algorithm.off_policy]\nhigh = 3\n", r"nothing reads high; set level = \"token\""),
        ("[algorithm.kl]\nplacement = 'loss'\nhorizon = 99\n", r"nothing reads horizon; set a target"),
        ("[algorithm]\nestimator = 'gae'\nlam_alpha = 0.1\n", r"nothing reads lam_alpha; set lam = \"length"),
        ("[training]\nlr_min = 1\n", r"lr_min = 1.0 is above lr = 1e-05"),
        ("[training]\nseed = -1\n", r"training\.seed: .*greater than or equal to 0, got -1"),
        (
            "[algorithm.kl]\nplacement = 'loss'\ntarget = 0.1\nhorizon = 31\n",
            r"kl\.horizon = 31 is less than a step's 32 rollouts, .*; raise it",
        ),
        (
            "[engine]\nweights = 'copy'\n[training]\noffload = true\n[rollouts]\nmax_staleness = 1\n",
            r"gives the device to one model at a time",
        ),
        ("[agent]\ncommand = 'python agent.py'\n", r"agent\.command: .*tuple"),
        ("[agent\n", r"config\.toml is not TOML"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        load_config(write(tmp_path, text))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"engine": {"kind": "scripted"}}, r'engine\.kind = "scripted" needs engine\.script'),
        ({"engine": {"kind": "vllm"}}, r'engine\.kind = "vllm" needs engine\.url'),
        ({"gateway": {"require_keys": 0, "host": "0.0.0.0"}}, r"require_keys = false .*; .* or keep the keys"),
        ({"rollouts": {"max_staleness": 1}}, r"max_staleness = 0 or engine\.weights = \"copy\""),
        ({"engine": {"dtype": "bfloat16"}}, r"engine\.dtype differs from model\.dtype"),
        ({"evaluation": {"every": 2}}, r"evaluation\.every needs \[evaluation\.tasks\]"),
        ({"tasks": {"dataset": "x", "callable": "y:z"}}, "give one of dataset, path, callable"),
        ({"agent": {"command": ["x"], "url": "http://y"}}, "give one of command, callable, url"),
        ({"algorithm": {"estimator": "pass_at_k"}}, 'estimator = "pass_at_k" needs `k`'),
        ({"algorithm": {"k": 2}}, 'estimator = "pass_at_k" needs `k`, and no other reads it'),
        ({"algorithm": {"policy_loss": "cispo", "clip_dual": 3.0}}, "cispo.* has no use for clip_dual"),
        ({"algorithm": {"estimator": "pass_at_k", "k": 9}}, r"k = 9 attempts are more than rollouts\.group_size = 8"),
        ({"judge": {"kind": "regex"}}, 'kind = "regex" needs `pattern`'),
        ({"judge": {"kind": "callable"}}, 'kind = "callable" needs `callable`'),
        ({"judge": {"kind": "command"}}, 'kind = "command" needs `command`'),
    ],
)
def test_settings_that_do_not_go_together(sections: dict[str, dict[str, object]], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(None, [f"{s}.{k}={_toml(v)}" for s, values in sections.items() for k, v in values.items()])


async def test_nothing_is_trained_in_float16(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'"float16" is too coarse .*: set model\.dtype = "float32"'):
        await train(load_config(None, ["model.dtype=float16"]), tmp_path / "run", Progress(1), lambda _: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.kind=scripted", "engine.script=x", "rollouts.max_staleness=2"],
        ["engine.weights=copy", "rollouts.max_staleness=2", "engine.dtype=bfloat16"],
        ["engine.dtype=float32"],
        ["evaluation.every=2", "evaluation.tasks.dataset=x"],
        ["algorithm.estimator=pass_at_k", "algorithm.k=8"],
        ["algorithm.kl.placement=loss", "algorithm.kl.target=0.1", "algorithm.kl.horizon=32"],
        ["algorithm.estimator=gae", "algorithm.lam=length_adaptive", "algorithm.lam_alpha=0.1"],
    ],
)
def test_settings_that_do(overrides: list[str]) -> None:
    load_config(None, overrides)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "example.com", "127.example.com", "128.0.0.1"])
def test_keys_are_required_where_others_can_reach(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^gateway: require_keys = false .* a loopback host"):
        load_config(None, ["gateway.require_keys=false", f'gateway.host="{host}"'])
    load_config(None, [f'gateway.host="{host}"'])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost", "LocalHost"])
def test_a_loopback_host_may_do_without_keys(host: str) -> None:
    assert not load_config(None, ["gateway.require_keys=false", f'gateway.host="{host}"']).gateway.require_keys


@pytest.mark.parametrize("url", ["gateway:8000", "ftp://gateway", "http://", "https:///", "http://a b", ""])
def test_a_public_url_is_one(url: str) -> None:
    with pytest.raises(ConfigError, match=rf"^gateway\.public_url: .*, got '{re.escape(url)}'"):
        load_config(None, [f'gateway.public_url="{url}"'])


def test_paths_can_be_put_behind_a_public_url() -> None:
    for url in ("https://gateway.example/steno", "https://gateway.example/steno/", "https://gateway.example/steno//"):
        assert load_config(None, [f"gateway.public_url={url}"]).gateway.public_url == "https://gateway.example/steno"


@pytest.mark.parametrize("override", ["training.lr", "=1", " =1", "nonsense"])
def test_an_override_without_a_name_or_a_value(override: str) -> None:
    with pytest.raises(ConfigError, match=r"write section\.field=VALUE"):
        load_config(None, [override])


def test_a_bad_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STENO_TRAINING__LR", "fast")
    with pytest.raises(ConfigError, match=r"training\.lr"):
        load_config()
    monkeypatch.delenv("STENO_TRAINING__LR")
    monkeypatch.setenv("STENO_TRAINING__LERNING", "1")
    with pytest.raises(ConfigError, match=r"unknown setting 'training\.lerning'"):
        load_config()


def test_a_secret_comes_from_the_environment_alone_and_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, overrides in ((write(tmp_path, "[engine]\napi_key = 'hush'\n"), []), (None, ["engine.api_key=hush"])):
        with pytest.raises(ConfigError, match=r"engine\.api_key is a secret; .* STENO_ENGINE__API_KEY") as refused:
            load_config(file, overrides)
        assert "hush" not in str(refused.value)
    monkeypatch.setenv("STENO_ENGINE__API_KEY", "hush")
    config = load_config()
    assert config.engine.api_key is not None
    assert config.engine.api_key.get_secret_value() == "hush"
    RunDir.create(tmp_path / "run", config)
    assert "api_key" not in (tmp_path / "run" / "config.toml").read_text()
    assert "hush" not in repr(config)
    for wrong in ("hush now", "hush\n", "h\u00fcsh"):
        monkeypatch.setenv("STENO_ENGINE__API_KEY", wrong)
        with pytest.raises(ConfigError, match=r"^engine\.api_key: ") as refused:
            load_config()
        assert wrong not in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config .*missing\.toml"):
        load_config(tmp_path / "missing.toml")


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().training.lr = 1.0


# Paths


def test_a_files_paths_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").touch()
    (tmp_path / "python").mkdir()
    text = """
    [model]
    path = "a/hub-name"
    chat_template = "chat.jinja"
    response_schema = "schema.json"
    [engine]
    script = "script.jsonl"
    [tasks]
    path = "tasks.jsonl"
    [agent]
    command = ["python", "agent.py", "other.py", "{prompt}"]
    [judge]
    kind = "callable"
    callable = "sub/judge.py:score"
    [evaluation]
    tasks = { callable = "package.module:make" }
    """
    file = write(tmp_path, text)
    monkeypatch.chdir("/")
    config = load_config(file)
    assert config.model.path == "a/hub-name"
    assert config.model.chat_template == tmp_path / "chat.jinja"
    assert config.model.response_schema == tmp_path / "schema.json"
    assert config.engine.script == tmp_path / "script.jsonl"
    assert config.tasks.path == tmp_path / "tasks.jsonl"
    assert config.agent.command == ("python", str(tmp_path / "agent.py"), "other.py", "{prompt}")
    assert config.judge.callable == f"{tmp_path}/sub/judge.py:score"
    assert config.evaluation.tasks.callable == "package.module:make"


def test_absolute_paths_and_those_of_the_command_line_stay(tmp_path: Path) -> None:
    file = write(tmp_path, "[tasks]\npath = '/data/tasks.jsonl'\n[evaluation.tasks]\npath = 'held-out.jsonl'\n")
    config = load_config(file, ["model.chat_template=here.jinja"])
    assert config.tasks.path == Path("/data/tasks.jsonl")
    assert config.evaluation.tasks.path == tmp_path / "held-out.jsonl"
    assert config.model.chat_template == Path("here.jinja")


def test_a_relative_config_has_a_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "[tasks]\npath = 'tasks.jsonl'\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("config.toml")).tasks.path == tmp_path / "tasks.jsonl"


def test_the_example_is_valid_wherever_it_is_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    config = load_config(EXAMPLE / "config.toml")
    assert config.agent.command[1] == str(EXAMPLE / "agent.py")
    assert config.tasks.callable == f"{EXAMPLE}/tasks.py:make"


# Every setting is read


def test_every_setting_is_read_by_something() -> None:
    read: set[tuple[str, str]] = set()
    for path in ROOT.rglob("*.py"):
        if path not in (ROOT / "config.py", ROOT / "config_training.py"):
            read |= Reads(ast.parse(path.read_text())).found
    # A setting that can have one value alone decides nothing yet.
    unread = [field for field in all_fields(Config) if not (_spellings(*field) & read or _one_value(*field))]
    assert not unread


def test_the_check_would_notice() -> None:
    source = """
def f(c: Config, path: Path):
    training = c.training
    return training.lr, path.steps, getattr(c.engine, f"max_{path}_p99"), c.sampling.force.model_dump()
"""
    found = Reads(ast.parse(source)).found
    assert ("TrainingConfig", "lr") in found
    assert ("TrainingConfig", "steps") not in found
    assert ("EngineConfig", "max_logprob_difference_p99") in found
    assert ("EngineConfig", "max_logprob_difference_mean") not in found
    assert ("SamplingValues", "top_p") in found


CLASSES: dict[str, type[BaseModel]] = {
    name: held
    for name, held in (vars(settings) | vars(config_training)).items()
    if isinstance(held, type) and issubclass(held, BaseModel)
}


class Reads:
    """Which fields of which sections a module reads: chains of attributes from whatever is annotated as a section."""

    def __init__(self, tree: ast.AST) -> None:
        self.found: set[tuple[str, str]] = set()
        self._names: dict[str, type[BaseModel]] = {}
        nodes = list(ast.walk(tree))
        for _ in range(3):  # aliases of aliases
            for node in nodes:
                self._name(node)
        for node in nodes:
            self._read(node)

    def _name(self, node: ast.AST) -> None:
        match node:
            case ast.arg(arg=name, annotation=ast.Name(id=annotation)) if annotation in CLASSES:
                self._names[name] = CLASSES[annotation]
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id=annotation)) if annotation in CLASSES:
                self._names["self." + name] = CLASSES[annotation]  # a dataclass's field
            case ast.Assign(targets=[ast.Name() | ast.Attribute() as target], value=value):
                self._assign([target], [value])
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                self._assign(targets, values)

    def _assign(self, targets: list[ast.expr], values: list[ast.expr]) -> None:
        for target, value in zip(targets, values, strict=True):
            if (section := self._section(value)) is not None:
                self._names[ast.unparse(target)] = section

    def _section(self, node: ast.expr) -> type[BaseModel] | None:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "load_config":
            return Config
        if (known := self._names.get(ast.unparse(node))) is not None:
            return known
        if isinstance(node, ast.Attribute) and (parent := self._section(node.value)) is not None:
            return _section_of(parent, node.attr)
        return None

    def _read(self, node: ast.AST) -> None:
        match node:
            case ast.Attribute(value=value, attr=name) if (section := self._section(value)) is not None:
                names = list(section.model_fields) if name == "model_dump" else [name]
                self.found |= {(section.__name__, name) for name in names}
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.JoinedStr(values=parts)]):
                pattern = "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".*" for p in parts)
                if (section := self._section(value)) is not None:
                    self.found |= {
                        (section.__name__, name) for name in section.model_fields if re.fullmatch(pattern, name)
                    }


def all_fields(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for name in model.model_fields:
        section = _section_of(model, name)
        yield from all_fields(section) if section is not None else [(model.__name__, name)]


def _section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    annotation = model.model_fields[name].annotation if name in model.model_fields else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _one_value(model: str, name: str) -> bool:
    annotation = CLASSES[model].model_fields[name].annotation
    return get_origin(annotation) is Literal and len(get_args(annotation)) == 1


def _toml(value: object) -> str:
    return str(value) if isinstance(value, int | list) else f'"{value}"'


def _spellings(model: str, name: str) -> set[tuple[str, str]]:
    """A setting is read as one of its section, or of what that section is made from."""
    return {(section.__name__, name) for section in CLASSES[model].__mro__}
