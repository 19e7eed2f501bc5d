"""Value models: the backbone of an actor, key for key, and one scalar per token in place of the language-model head."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from stenograph.errors import CheckpointError, ConfigError, boundary

HEAD = "value_head.weight"  # [1, hidden]
# What goes with a language-model head, by the names that architectures have for it; a zero of its type turns it off.
# Balancing losses of experts (router_aux_loss_coef) are about the backbone, and stay.
_OF_THE_LM_HEAD = (
    "tie_word_embeddings",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "mtp_loss_scaling_factor",
    "z_loss_coefficient",
    "router_z_loss_coef",
)


class ValueOutput(NamedTuple):  # a tuple, since what wraps modules looks for tensors in those
    """`balancing_loss` is weighted already; None without experts, or where their balance has no weight."""

    values: Tensor  # [batch, tokens] float32, in the unit of the returns
    balancing_loss: Tensor | None  # []


class ValueModel(PreTrainedModel):
    """What a critic adds to the class of its actor and takes from it; `value_class` joins the two."""

    backbone_name: str
    value_head: nn.Linear

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)  # the actor's: whatever it builds beside the backbone goes again
        head = super().get_output_embeddings()
        self.backbone_name = _backbone_name(self, head)
        for name in [name for name, _ in self.named_children() if name != self.backbone_name]:
            delattr(self, name)
        hidden = cast(nn.Linear, head).in_features
        self.value_head = nn.Linear(hidden, 1, bias=False, dtype=torch.float32)

    @property
    def backbone(self) -> PreTrainedModel:
        return getattr(self, self.backbone_name)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> ValueOutput:
        """The value of the state after each token; the arguments are the backbone's."""
        output = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        hidden = output.last_hidden_state
        # A return needs more digits than bfloat16 has.
        with torch.autocast(hidden.device.type, enabled=False):
            values = nn.functional.linear(hidden.float(), self.value_head.weight.float())[..., 0]
        return ValueOutput(values, self._balancing_loss(getattr(output, "router_logits", None)))

    def _balancing_loss(self, router_logits: tuple[Tensor, ...] | None) -> Tensor | None:
        """The actor's own, as transformers adds it to a language model's loss."""
        config = self.config.get_text_config()
        weight = getattr(config, "router_aux_loss_coef", None)
        if not router_logits or not weight:
            return None
        num_experts = router_logits[0].shape[-1]
        loss = load_balancing_loss_func(
            router_logits,  # pyright: ignore[reportArgumentType]
            num_experts,
            config.num_experts_per_tok,
        )
        return weight * cast(Tensor, loss)

    @torch.no_grad()
    def draw_head(self, seed: int) -> None:
        """A new head, Normal(0, 1 / (hidden + 1)): values begin near 0, whatever the backbone's scale.

        On the CPU and from `seed` alone, so that it is the same on every rank and device. As in Hu et al. 2025,
        "Open-Reasoner-Zero" (arXiv:2503.24290).
        """
        weight = self.value_head.weight
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        weight.copy_(drawn / (weight.shape[1] + 1))

    def _init_weights(self, module: nn.Module) -> None:
        if module is not getattr(self, "value_head", None):  # draw_head's; here it would move the global generator
            super()._init_weights(module)

    def get_output_embeddings(self) -> None:
        return None

    @classmethod
    def can_generate(cls) -> bool:
        return False


def as_value_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of a critic for the actor that `config` describes; what a vision tower has stays as it is.

    `value_head` marks it, in its config.json too; `architectures` still names the actor's class.
    """
    value = copy.deepcopy(config)
    for part in (value, value.get_text_config()):
        for name in _OF_THE_LM_HEAD:
            if on := getattr(part, name, None):
                setattr(part, name, type(on)())
        if getattr(part, "router_aux_loss_coef", None):
            part.output_router_logits = True  # without them there would be nothing to balance
    value.value_head = True
    return value


@functools.cache
def value_class(actor_class: type[PreTrainedModel]) -> type[ValueModel]:
    """The class of critics for actors of `actor_class`."""
    # By these names transformers finds how the keys of checkpoints become a class's own.
    names = {"__module__": actor_class.__module__, "__qualname__": actor_class.__qualname__}
    return type(actor_class.__name__, (ValueModel, actor_class), names)


def critic_from_actor(actor: PreTrainedModel, *, seed: int, dtype: torch.dtype | None = None) -> ValueModel:
    """A critic with copies of the weights of `actor`, on its device, in `dtype` (default: the actor's); in eval mode.

    Raises ConfigError for a model that has no backbone of its own.
    """
    config = as_value_config(actor.config)
    with torch.device("meta"):
        critic = value_class(type(actor))._from_config(config, dtype=dtype or actor.dtype)
    critic.to_empty(device=actor.device)
    own = dict(chain(critic.named_parameters(remove_duplicate=False), critic.named_buffers(remove_duplicate=False)))
    with torch.no_grad():
        for name, tensor in own.items():
            if name != HEAD:
                tensor.copy_(cast(Tensor, actor.get_parameter_or_buffer(name)))
    critic.draw_head(seed)
    return critic.eval()


def load_critic(
    source: str | Path,
    *,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ValueModel:
    """The critic at a folder or hub name, in evaluation mode: from a critic's checkpoint, or from an actor's.

    An actor's lacks the value head, which is drawn from `seed`; without a seed only a critic's checkpoint will do. The
    actor's own head is not read. Raises CheckpointError for a checkpoint that cannot be read, and where anything else
    is missing, unexpected or of another shape; ConfigError for a model that has no backbone of its own.
    """
    actor = _skeleton(source, revision, trust_remote_code)
    is_critic = getattr(actor.config, "value_head", False)
    if not is_critic and seed is None:
        raise CheckpointError(
            f"{source} is not a critic: its config.json does not say value_head = true; "
            "give a critic's checkpoint, or a seed to draw the head of a new one from"
        )
    with boundary(CheckpointError, f"load a critic from {source}"):
        with _quiet():
            loaded = value_class(type(actor)).from_pretrained(
                source,
                revision=revision,  # pyright: ignore[reportArgumentType]
                config=as_value_config(actor.config),
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with the rest
            )
    critic, info = cast(tuple[ValueModel, dict[str, Any]], loaded)
    allowed = set() if is_critic else {HEAD}
    _refuse(source, "lacks", info["missing_keys"] - allowed)
    _refuse(source, "is an actor's by its config.json, and yet has", allowed - info["missing_keys"])
    _refuse(source, "has no place in the critic for", _unexpected(info["unexpected_keys"], actor, critic, is_critic))
    _refuse(source, "has another shape of", {name for name, *_ in info["mismatched_keys"]})

    # They are views of the file, whose alignment would show in the last bit of what is computed from them.
    for tensor in chain(critic.parameters(), critic.buffers()):
        tensor.data = tensor.data.to(device, copy=True)
    if not is_critic:
        critic.draw_head(cast(int, seed))
    return critic


def _skeleton(source: str | Path, revision: str | None, trust_remote_code: bool) -> PreTrainedModel:
    """The actor that the config.json at `source` describes, without memory for its weights."""
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as e:
        reason = str(e).strip().partition("\n")[0]
        raise CheckpointError(
            f"{source} is not the checkpoint of a language model ({reason}); "
            "give the folder of one, or a hub name that can be reached"
        ) from e


def _unexpected(names: set[str], actor: PreTrainedModel, critic: ValueModel, is_critic: bool) -> set[str]:
    """What of the unexpected `names` neither the actor ignores, nor an actor's checkpoint has in its own head."""
    ignored = actor._keys_to_ignore_on_load_unexpected or ()
    heads = set() if is_critic else actor.state_dict().keys() - critic.state_dict().keys()
    return {name for name in names - heads if not any(re.search(pattern, name) for pattern in ignored)}


def _refuse(source: str | Path, what: str, names: set[str]) -> None:
    if names:
        raise CheckpointError(
            f"{source} {what} {len(names)} of the weights, such as {min(names)}; "
            "give a whole checkpoint of the critic, or of the actor that it is made from"
        )


def _backbone_name(model: PreTrainedModel, head: nn.Module | None) -> str:
    """The child that embeds the tokens: base_model_prefix does not name it in every architecture."""
    embeddings = model.get_input_embeddings()
    for name, child in model.named_children():
        modules = set(child.modules())
        if isinstance(child, PreTrainedModel) and embeddings in modules and head is not None and head not in modules:
            return name
    raise ConfigError(
        f"a critic needs a backbone apart from the language-model head, and {type(model).__name__} has none; "
        "choose another model, or an estimator without a critic"
    )


def _auto_class(config: PreTrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    is_vision = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if is_vision and not is_causal else AutoModelForCausalLM


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report on what is missing: here that is meant so, or an error."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
