"""A critic of every family is its actor's backbone and one new vector; checkpoints are read whole or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stenograph.errors import CheckpointError, ConfigError
from stenograph.training.critic import HEAD, ValueModel, as_value_config, critic_from_actor, load_critic
from stenograph.training.weights import save_model
from support.families import TEXT, VISION, random_actor
from support.models import tiny_model

IDS = torch.randint(0, 90, (1, 13), generator=torch.Generator().manual_seed(0))


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    states = a.state_dict(), b.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
        assert tensor.dtype == states[1][name].dtype, name


@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_a_critic_is_its_actors_backbone_and_a_head(family: str) -> None:
    actor = random_actor(family)
    critic = critic_from_actor(actor, seed=3)
    backbone = getattr(actor, critic.backbone_name)

    expected = {f"{critic.backbone_name}.{name}": tensor for name, tensor in backbone.state_dict().items()}
    state = critic.state_dict()
    assert state.keys() == {*expected, HEAD}
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert not {p.data_ptr() for p in critic.parameters()} & {p.data_ptr() for p in actor.parameters()}

    hidden = backbone(input_ids=IDS, use_cache=False).last_hidden_state
    assert torch.equal(critic.backbone(input_ids=IDS, use_cache=False).last_hidden_state, hidden)
    values = critic(IDS).values
    assert values.shape == IDS.shape
    assert values.dtype == torch.float32
    # neither a cap on logits, nor their scale, has a say
    torch.testing.assert_close(values, hidden @ critic.value_head.weight[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_checkpoints_of_actors_and_critics_give_the_same_critic(family: str, tmp_path: Path) -> None:
    actor = random_actor(family)
    critic = critic_from_actor(actor, seed=3)
    save_model(actor, tmp_path / "actor")
    save_model(critic, tmp_path / "critic")
    for loaded in (load_critic(tmp_path / "actor", seed=3), load_critic(tmp_path / "critic")):
        assert_same_weights(loaded, critic)
        assert torch.equal(loaded(IDS).values, critic(IDS).values)
        assert not loaded.training
        assert all(p.requires_grad for p in loaded.parameters())
    assert json.loads((tmp_path / "critic/config.json").read_text())["value_head"] is True


@pytest.mark.parametrize("family", VISION)
def test_only_the_text_part_is_converted(family: str) -> None:
    config = VISION[family]()
    before = config.to_dict()
    value = as_value_config(config)
    assert config.to_dict() == before
    assert value.vision_config.to_dict() == config.vision_config.to_dict()
    assert not getattr(value, "tie_word_embeddings", False)
    assert not getattr(value.get_text_config(), "tie_word_embeddings", False)


def test_what_belongs_to_the_language_model_head_is_off() -> None:
    value = as_value_config(hf.DeepseekV3Config(num_mtp_layers=2, tie_word_embeddings=True))
    assert (value.num_mtp_layers, value.tie_word_embeddings) == (0, False)
    assert as_value_config(hf.MixtralConfig(router_aux_loss_coef=0.5)).router_aux_loss_coef == 0.5
    assert as_value_config(hf.BambaConfig(z_loss_coefficient=0.1)).z_loss_coefficient == 0


def test_a_tied_embedding_stays_the_actors() -> None:
    actor = tiny_model()
    assert actor.lm_head.weight is actor.model.embed_tokens.weight
    critic = critic_from_actor(actor, seed=0)
    before = actor.model.embed_tokens.weight.detach().clone()
    optimizer = torch.optim.SGD(critic.parameters(), lr=1.0)
    critic(IDS).values.square().sum().backward()
    optimizer.step()
    assert torch.equal(actor.model.embed_tokens.weight, before)
    assert not torch.equal(critic.get_parameter("model.embed_tokens.weight"), before)
    assert sum(p.numel() for p in critic.parameters()) == sum(p.numel() for p in actor.parameters()) + 64


def test_the_head_is_normal_with_the_inverse_of_the_width() -> None:
    critic = critic_from_actor(tiny_model(), seed=0)
    heads = []
    for seed in range(400):
        critic.draw_head(seed)
        heads.append(critic.value_head.weight.detach().clone())
    drawn = torch.stack(heads).double() * 65  # [400, 1, 64], standard normal
    n = drawn.numel()
    assert abs(drawn.mean()) < 4 / math.sqrt(n)
    assert abs(drawn.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((drawn**4).mean() - 3) < 4 * math.sqrt(96 / n)
    assert len({tuple(head[0, :2].tolist()) for head in heads}) == 400


def test_the_head_is_the_seeds_alone_and_torchs_generator_stays(tmp_path: Path) -> None:
    actor = tiny_model()
    save_model(actor, tmp_path / "actor")
    heads: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        for rank in range(2):
            torch.manual_seed(rank)
            before = torch.random.get_rng_state()
            for critic in (critic_from_actor(actor, seed=5), load_critic(tmp_path / "actor", seed=5)):
                heads.append(critic.value_head.weight)
            assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(head, heads[0]) for head in heads)
    assert not torch.equal(critic_from_actor(actor, seed=6).value_head.weight, heads[0])


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_balancing_loss_of_experts_is_the_actors(family: str) -> None:
    actor = random_actor(family)
    critic = critic_from_actor(actor, seed=0)
    loss = critic(IDS).balancing_loss
    torch.testing.assert_close(loss, 0.25 * actor(input_ids=IDS, output_router_logits=True).aux_loss)
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for name, p in critic.named_parameters() if ".gate." in name)
    assert not actor.config.output_router_logits  # as in most checkpoints, which are made to be served
    actor.config.router_aux_loss_coef = 0.0
    assert critic_from_actor(actor, seed=0)(IDS).balancing_loss is None


def test_autocast_leaves_the_head_in_float32() -> None:
    critic = critic_from_actor(tiny_model(), seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = critic.backbone(input_ids=IDS, use_cache=False).last_hidden_state
        values = critic(IDS).values
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, hidden.float() @ critic.value_head.weight[0], rtol=1e-6, atol=1e-6)
    assert not torch.equal(values, values.bfloat16().float())
    values.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in critic.parameters())


def test_a_critic_in_bfloat16_has_its_head_in_float32(tmp_path: Path) -> None:
    actor = tiny_model(dtype=torch.bfloat16)
    save_model(actor, tmp_path / "actor")
    critic = critic_from_actor(actor, seed=0)
    assert {p.dtype for p in critic.backbone.parameters()} == {torch.bfloat16}
    assert critic.value_head.weight.dtype == torch.float32
    assert critic(IDS).values.dtype == torch.float32
    save_model(critic, tmp_path / "critic")
    for folder in ("actor", "critic"):
        assert_same_weights(load_critic(tmp_path / folder, seed=0, dtype=torch.bfloat16), critic)
    wide = load_critic(tmp_path / "actor", seed=0)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert_same_weights(wide, critic_from_actor(actor, seed=0, dtype=torch.float32))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """An actor's checkpoint and a critic's, for a test to damage."""
    actor = tiny_model()
    for name, model in (("actor", actor), ("critic", critic_from_actor(actor, seed=0))):
        save_model(model, tmp_path / name)
    return {"actor": tmp_path / "actor", "critic": tmp_path / "critic"}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("critic", lambda t: t.pop(HEAD), "lacks 1 of the weights, such as value_head.weight"),
        ("critic", lambda t: t.pop(NORM), "lacks 1 of the weights, such as model.norm.weight"),
        ("actor", lambda t: t.pop(NORM), "lacks 1 of the weights, such as model.norm.weight"),
        ("critic", lambda t: t.update({"lm_head.weight": torch.zeros(1)}), "no place .* such as lm_head.weight"),
        ("critic", lambda t: t.update({"model.more": torch.zeros(1)}), "no place .* such as model.more"),
        ("actor", lambda t: t.update({"model.more": torch.zeros(1)}), "no place .* such as model.more"),
        ("actor", lambda t: t.update({HEAD: torch.zeros(1, 64)}), "is an actor's by its config.json, and yet has 1"),
        ("critic", lambda t: t.update({HEAD: torch.zeros(2, 64)}), "another shape of 1 .* such as value_head.weight"),
        ("actor", lambda t: t.update({NORM: torch.zeros(3)}), "another shape of 1 .* such as model.norm.weight"),
    ],
)
def test_whatever_else_differs_is_refused(
    folders: dict[str, Path], kind: str, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    edit(folders[kind], change)
    with pytest.raises(CheckpointError, match=f"{message}.*; give a whole checkpoint"):
        load_critic(folders[kind], seed=0)


def test_an_actors_own_head_is_left_out(folders: dict[str, Path]) -> None:
    edit(folders["actor"], lambda t: t.update({"lm_head.weight": torch.zeros(307, 64)}))
    assert_same_weights(load_critic(folders["actor"], seed=0), load_critic(folders["critic"]))


def test_without_a_seed_only_a_critic_will_do(folders: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"is not a critic.*give a critic's checkpoint, or a seed"):
        load_critic(folders["actor"])


def test_what_cannot_be_read_is_a_checkpoint_error(folders: dict[str, Path], tmp_path: Path) -> None:
    weights = folders["critic"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=f"could not load a critic from {folders['critic']}"):
        load_critic(folders["critic"])
    hf.ViTConfig().save_pretrained(tmp_path / "image")
    for name in ("absent", "image"):
        with pytest.raises(CheckpointError, match=f"^{tmp_path / name} is not the checkpoint of a language model") as e:
            load_critic(tmp_path / name)
        assert "\n" not in str(e.value)


def test_a_model_without_a_backbone_of_its_own_is_refused() -> None:
    config = hf.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with torch.device("meta"):
        actor = hf.T5ForConditionalGeneration(config)
    with pytest.raises(ConfigError, match="T5ForConditionalGeneration has none; choose another model"):
        critic_from_actor(actor, seed=0)


def test_a_critic_does_not_generate() -> None:
    critic: ValueModel = critic_from_actor(tiny_model(), seed=0)
    assert not critic.can_generate()
    assert critic.get_output_embeddings() is None
