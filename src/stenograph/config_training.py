"""The settings of what is learnt from a step's rollouts, and how; what one setting makes of another is said here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NotNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def changed(self, *names: str) -> list[str]:
        """Which of these settings (default: all) are not what they are by default."""
        fields = type(self).model_fields
        return [name for name in names or fields if getattr(self, name) != fields[name].get_default()]


class KLConfig(Section):
    """What it costs to move away from the reference, the model at `model.path`."""

    placement: Literal["none", "reward", "loss"] = "none"  # reward: the critic learns it too
    kind: Literal["k1", "k2", "k3", "abs"] | None = None  # default: k1 in the reward, k2 in the loss
    beta: Positive = 0.01  # reward per nat; with a target the first step's
    target: Positive | None = None  # nats a token that beta is adapted to
    horizon: PositiveInt = 10_000  # rollouts over which beta may change by a fifth
    behaviour: Literal["actor", "engine"] = "actor"  # whose log-probabilities the reward's are; engine: as sampled

    @model_validator(mode="after")
    def _learnable(self) -> KLConfig:
        if self.placement == "loss" and self.kind == "k1":
            raise ValueError('kind = "k1" has an expected gradient of 0 in the loss; use "k2"')
        if self.placement == "none" and (idle := self.changed()):
            raise ValueError(f'nothing reads {", ".join(idle)}; set placement = "reward" or "loss", or leave it out')
        if self.placement == "loss" and self.behaviour == "engine":
            raise ValueError('behaviour = "engine" is of placement = "reward": the loss has the policy\'s own')
        if self.target is None and self.changed("horizon"):
            raise ValueError("nothing reads horizon; set a target that beta is adapted to, or leave it out")
        return self


class OffPolicyConfig(Section):
    """Importance weights between the policy that sampled (`rollout_logprobs`) and the trained one (`old_logprobs`)."""

    level: Literal["none", "token", "sequence", "geometric"] = "none"
    bound: Literal["truncate", "mask"] = "truncate"
    high: Positive = 2.0
    low: Positive | None = None  # bound = "mask"
    veto: Positive | None = None  # a sequence with a token whose ratio is below this is rejected whole
    max_staleness: NotNegativeInt | None = None  # tokens of policy versions older than this are rejected
    count_rejected: bool = True  # in the loss's denominator

    @model_validator(mode="after")
    def _bounds(self) -> OffPolicyConfig:
        if self.level == "none" and (idle := self.changed()):
            raise ValueError(f'nothing reads {", ".join(idle)}; set level = "token", "sequence" or "geometric"')
        if self.low is not None and (self.bound != "mask" or self.low >= self.high):
            raise ValueError('low needs bound = "mask", and a value below high')
        return self


class AlgorithmConfig(Section):
    """From rewards to a loss. `estimator = "gae"` is PPO: it has a critic, and the others have none."""

    estimator: Literal[
        "gae", "grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline"
    ] = "grpo"
    k: PositiveInt | None = None  # pass_at_k: attempts of which the best counts
    credit: Literal["every_branch", "main_branch"] = "every_branch"  # whom a rollout's reward is for

    # gae; for the policy's advantages and the critic's returns alike
    gamma: Fraction = 1.0
    lam: Fraction | Literal["length_adaptive"] = 0.95
    lam_alpha: Positive = 0.05  # length_adaptive: the reward reaches back over 1 / alpha of the actions
    critic_lam: Fraction | None = None  # of the returns; default: lam
    turn_gamma: Fraction | None = None  # from a turn to the next; default: gamma
    turn_lam: Fraction | None = None  # likewise; default: lam
    bootstrap: Literal["zero", "value"] = "zero"  # behind a sequence that was cut short
    whiten: bool = True  # advantages to mean 0 and variance 1 over the step's trainable tokens

    policy_loss: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"  # gspo: its ratios need clips of some 3e-4
    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    clip_dual: Annotated[float, Field(gt=1)] | None = None  # the most that a negative advantage weighs, in ratios
    reduction: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    length: PositiveInt | None = None  # constant_length: what every sequence's sum is divided by
    kl: KLConfig = KLConfig()
    off_policy: OffPolicyConfig = OffPolicyConfig()

    @property
    def has_critic(self) -> bool:
        return self.estimator == "gae"

    @model_validator(mode="after")
    def _complete(self) -> AlgorithmConfig:
        if (self.estimator == "pass_at_k") != (self.k is not None):
            raise ValueError('estimator = "pass_at_k" needs `k`, and no other reads it')
        if (self.reduction == "constant_length") != (self.length is not None):
            raise ValueError('reduction = "constant_length" needs `length`, and no other reads it')
        if self.policy_loss == "cispo" and self.clip_dual is not None:
            raise ValueError('policy_loss = "cispo" has no use for clip_dual; leave it out')
        if self.lam != "length_adaptive" and self.has_critic and self.changed("lam_alpha"):
            raise ValueError('nothing reads lam_alpha; set lam = "length_adaptive", or leave it out')
        return self

    @model_validator(mode="after")
    def _of_tokens(self) -> AlgorithmConfig:
        """What only an estimator of tokens reads."""
        if self.has_critic:
            return self
        names = ("gamma", "lam", "lam_alpha", "critic_lam", "turn_gamma", "turn_lam", "bootstrap", "whiten")
        if idle := self.changed(*names):
            raise ValueError(f'nothing reads {", ".join(idle)}; set estimator = "gae", or leave it out')
        if self.kl.placement == "reward":
            raise ValueError('kl.placement = "reward" needs rewards of tokens: set estimator = "gae", or use "loss"')
        return self


class OptimizerConfig(Section):
    """How one model is trained on a step's rollouts."""

    lr: Positive = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup: NotNegativeInt = 0  # updates from 0 to lr
    lr_min: NotNegative = 0.0  # where linear and cosine end, and stay
    weight_decay: NotNegative = 0.0
    num_epochs: PositiveInt = 1
    num_minibatches: PositiveInt = 1
    max_grad_norm: Positive = 1.0
    max_grad_norm_skip: Positive | None = None  # an update whose gradient has a norm above this is not made

    @model_validator(mode="after")
    def _falling(self) -> OptimizerConfig:
        if self.lr_min > self.lr:
            raise ValueError(f"lr_min = {self.lr_min} is above lr = {self.lr}; a schedule ends at most there")
        return self


class CriticConfig(OptimizerConfig):
    """The value model of `algorithm.estimator = "gae"`: more passes and a higher rate than the actor's."""

    path: str | None = None  # a critic's checkpoint; default: the actor's backbone with a new head
    lr: Positive = 5e-5
    num_epochs: PositiveInt = 2
    value_clip: Positive | None = None  # how far a value may move in a step and still lower the loss
    warmup_steps: NotNegativeInt = 0  # training steps at the beginning that leave the actor as it is
    warmup_explained_variance: Fraction | None = None  # the warm-up ends sooner where this much is explained

    @model_validator(mode="after")
    def _warm(self) -> CriticConfig:
        if self.warmup_explained_variance is not None and not self.warmup_steps:
            raise ValueError("warmup_explained_variance needs warmup_steps, the most that the warm-up may take")
        return self


class TrainingConfig(OptimizerConfig):
    """The actor's optimizer, and what all models have in common."""

    steps: PositiveInt = 100
    num_ranks: Literal[1] = 1
    pack_max_tokens: PositiveInt = 4096
    autocast: Literal["bfloat16"] | None = None  # forward and backward; weights and optimizer stay in model.dtype
    num_threads: PositiveInt | None = None  # torch's; default: its own choice
    device: str | None = None  # default: cuda where there is one, else cpu
    offload: bool = False  # what a phase does not need waits in main memory
    seed: NotNegativeInt = 0
    record: Annotated[str, Field(pattern=r"^(all|none|sample:\d+)$")] = "sample:64"  # branches a step, per token
    checkpoint_every: NotNegativeInt = 10  # steps; also after the last. 0: never
    keep_checkpoints: PositiveInt = 2  # the newest; those before go
    shuffle_rewards: bool = False  # the control: rewards permuted over the step's rollouts, none for turns
