"""The same model in transformers: Llama or Qwen3, with our weights under their names.

In: a MiniGPT with rotary positions, rms norm before each part, swiglu and no bias. Out: a
LlamaForCausalLM of the same numbers, or with normalised queries and keys a Qwen3ForCausalLM.

L n_layers
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minigpt.config import ModelConfig
from minigpt.errors import UserError, require
from minigpt.evaluate import evaluating
from minigpt.model import MiniGPT

PARTS = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.widen": "mlp.up_proj",
    "feed_forward.narrow": "mlp.down_proj",
}


def llama_names(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name our tensors, weights or gradients, as Llama and Qwen3 have them."""
    theirs = {}
    for name, tensor in ours.items():
        part = name.removesuffix(".weight")
        if name == "output.table":
            continue  # the tied table
        if part.startswith("blocks."):
            _, i, part = part.split(".", 2)
            theirs[f"model.layers.{i}.{PARTS[part]}.weight"] = tensor
        else:
            theirs[f"{PARTS[part]}.weight"] = tensor
    return theirs


def llama_like(config: ModelConfig) -> Any:
    """Return transformers' model of the sizes of config, with weights of its own."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    except ImportError:
        raise UserError("transformers is not installed: pip install transformers") from None
    config = config.resolved()
    shared: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.d_head,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        # The defaults name ids of another vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.qk_norm:
        return Qwen3ForCausalLM(Qwen3Config(**shared)).eval()
    return LlamaForCausalLM(LlamaConfig(**shared)).eval()


def as_transformers(model: MiniGPT) -> Any:
    """Return transformers' model with the weights of ours. Raises UserError where none is alike."""
    theirs = llama_like(model.config)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    try:
        missing, unexpected = theirs.load_state_dict(llama_names(weights), strict=False)
    except (KeyError, RuntimeError) as error:
        raise UserError(f"transformers has no model of these parts ({error})") from None
    require(
        missing == ["lm_head.weight"] and not unexpected,  # tied
        f"transformers has no model of these parts ({missing} missing, {unexpected} unexpected)",
    )
    theirs.tie_weights()
    with torch.inference_mode(), evaluating(model):
        ids = torch.arange(min(5, model.config.vocab_size))[None]
        apart = float((model(ids) - theirs(ids).logits).abs().max())
    require(apart < 1e-4, f"transformers' logits are {apart:.1e} apart from ours")
    return theirs
