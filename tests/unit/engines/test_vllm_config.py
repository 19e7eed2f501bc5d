"""A vLLM server is named in the config, served from, and not trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from stenograph.config import Config, EngineConfig, ModelConfig
from stenograph.config_loading import load_config
from stenograph.engines.base import Engine
from stenograph.engines.vllm import VllmEngine
from stenograph.errors import ConfigError
from stenograph.progress import Progress
from stenograph.rendering import builtin_tokenizer, load_rendering
from stenograph.rendering.loading import family_rendering
from stenograph.run import build_engine, train
from support.tokenizers import pieces_tokenizer
from support.vllm import FakeVllm, fake_vllm


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the tokenizer that the stand-in has, and no weights."""
    builtin_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config(server: FakeVllm, model: Path) -> Config:
    settings = ["engine.kind=vllm", f"engine.url={server.url}", f"model.path={model}", "model.renderer=qwen3"]
    return load_config(None, settings)


async def build(config: Config) -> Engine:
    engine = await build_engine(config, load_rendering(config.model), None)
    await engine.aclose()
    return engine


async def test_the_config_builds_it(model: Path) -> None:
    with fake_vllm() as server:
        assert isinstance(await build(config(server, model)), VllmEngine)


async def test_the_server_has_the_tokenizer_that_prompts_are_rendered_by(model: Path) -> None:
    tokenizer = pieces_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": builtin_tokenizer().all_special_tokens})
    another = family_rendering(tokenizer, {"name": "qwen3"}, ModelConfig())
    with fake_vllm() as server:
        told = rf"^model\.path: '{model}' .*'tiny' at {server.url}; set model\.path to the model"
        with pytest.raises(ConfigError, match=told) as refused:
            await build_engine(config(server, model), another, None)
    assert "\n" not in str(refused.value)


async def test_a_server_that_does_not_tell_its_ids_is_believed(model: Path) -> None:
    with fake_vllm("--without", "/tokenize") as server:
        await build(config(server, model))


def test_an_address_and_a_model_are_needed() -> None:
    with pytest.raises(ConfigError, match=r'engine\.kind = "vllm" needs engine\.url'):
        load_config(None, ["engine.kind=vllm"])
    with pytest.raises(ConfigError, match=r"engine\.url: .*, got 'localhost:8000'"):
        load_config(None, ["engine.kind=vllm", "engine.url=localhost:8000"])
    with pytest.raises(ConfigError, match=r'engine\.kind = "vllm" needs model\.path'):
        load_config(None, ["engine.kind=vllm", "engine.url=http://localhost:8000"])


async def test_it_cannot_be_trained(tmp_path: Path) -> None:
    config = Config(engine=EngineConfig(kind="vllm", url="http://127.0.0.1:9"), model=ModelConfig(path="any"))
    with pytest.raises(ConfigError, match=r'"vllm" cannot be given new weights: set engine\.kind = "local"'):
        await train(config, tmp_path / "run", Progress(1), lambda _: None)
    assert not (tmp_path / "run").exists()
