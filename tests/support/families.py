"""Tiny models of many architectures, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 1}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.25}
MULTIMODAL_ROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}

TEXT: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "llama4": lambda: hf.Llama4TextConfig(**GROUPED, head_dim=8, intermediate_size_mlp=24, num_local_experts=2),
    "qwen2": lambda: hf.Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=8),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**GROUPED, **EXPERTS, num_experts=4, moe_intermediate_size=8),
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, **EXPERTS, num_local_experts=4),
    "gemma2": lambda: hf.Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=0.01),
    "gemma3": lambda: hf.Gemma3TextConfig(**GROUPED, head_dim=8),
    "gpt2": lambda: hf.GPT2Config(vocab_size=97, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**SIZES),
    "phi": lambda: hf.PhiConfig(**GROUPED),
    "smollm3": lambda: hf.SmolLM3Config(**GROUPED, pad_token_id=0, tie_word_embeddings=True),
    # its head reads fewer features than the layers have
    "opt": lambda: hf.OPTConfig(
        vocab_size=97, hidden_size=16, word_embed_proj_dim=8, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **SIZES,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=8,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    ),
}
VISION: dict[str, Callable[[], PreTrainedConfig]] = {
    "llava": lambda: hf.LlavaConfig(
        text_config=hf.LlamaConfig(**GROUPED),
        vision_config=hf.CLIPVisionConfig(**TOWER, intermediate_size=24, projection_dim=16),
        image_token_index=96,
    ),
    "gemma3_vision": lambda: hf.Gemma3Config(
        text_config={**GROUPED, "head_dim": 8},
        vision_config={**TOWER, "intermediate_size": 24},
        mm_tokens_per_image=4,
        image_token_index=96,
    ),
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        text_config={**GROUPED, "rope_parameters": MULTIMODAL_ROPE},
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        tie_word_embeddings=True,
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config={**GROUPED, "head_dim": 8, "rope_parameters": MULTIMODAL_ROPE},
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 16,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    ),
}


def random_actor(family: str) -> PreTrainedModel:
    """A random model whose every weight is away from the initialisation's zeros and ones."""
    auto = AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        actor = auto.from_config((TEXT | VISION)[family]()).eval()
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return actor
