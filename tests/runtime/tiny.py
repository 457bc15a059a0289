"""Tiny random-weight models of many architectures, in float64. Knows nothing of what tests do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

VOCAB_SIZE = 96
CONTEXT_LEN = 256
WINDOW = 7  # sliding windows, shorter than the tests' prompts

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LEN,
    "initializer_range": 0.3,  # large enough that greedy text does not repeat one token
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT_LEN,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FOUR_LAYERS: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
_OPT: dict[str, Any] = {  # calls its decoder, never its base model
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "word_embed_proj_dim": 16,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT_LEN,
    "init_std": 0.3,
}
_LLAMA4: dict[str, Any] = {  # is its own base model
    **_COMMON,
    "head_dim": 8,
    "intermediate_size_mlp": 48,
    "num_local_experts": 2,
    "layer_types": ["full_attention"] * 2,
    "no_rope_layers": [1, 0],
}
_GEMMA3N: dict[str, Any] = {  # hidden states of four dimensions; layers that share keys and values
    **_FOUR_LAYERS,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def longrope(factor: float = 4.0) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [factor] * 4,
        "original_max_position_embeddings": 64,
    }


# Served, by the name that tests show.
SERVED: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_COMMON),
    "llama3-rope": lambda: hf.LlamaConfig(**_COMMON, rope_parameters=_LLAMA3_ROPE),
    "mistral": lambda: hf.MistralConfig(**_COMMON, sliding_window=WINDOW),
    "gemma3": lambda: hf.Gemma3TextConfig(**_FOUR_LAYERS, query_pre_attn_scalar=8),
    "gemma2": lambda: hf.Gemma2Config(
        **_FOUR_LAYERS, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "qwen2": lambda: hf.Qwen2Config(**_COMMON),
    "qwen3": lambda: hf.Qwen3Config(**_COMMON, head_dim=8),
    "gpt2": lambda: hf.GPT2Config(**_GPT2),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**_COMMON),
    "olmo2": lambda: hf.Olmo2Config(**_COMMON),
    "phi3": lambda: hf.Phi3Config(**_COMMON, sliding_window=WINDOW),
    "stablelm": lambda: hf.StableLmConfig(**_COMMON),
    "opt": lambda: hf.OPTConfig(**_OPT),
    "llama4": lambda: hf.Llama4TextConfig(**_LLAMA4, attn_temperature_tuning=False),
    "gemma3n": lambda: hf.Gemma3nTextConfig(**_GEMMA3N),
    "mixtral": lambda: hf.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
}

# Served by the native kernel too, once their heads are as wide as it takes.
WIDE = ("llama", "llama3-rope", "mistral", "gemma3", "gemma2", "qwen2", "qwen3", "gpt2", "olmo2", "phi3", "mixtral")


def wide(name: str) -> Any:
    """The config of this name with heads of 32."""
    config = SERVED[name]()
    for attribute, value in {"hidden_size": 128, "head_dim": 32, "query_pre_attn_scalar": 32}.items():
        if hasattr(config, attribute):
            setattr(config, attribute, value)
    return config


# Refused, with a part of the reason that the error must give.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bloom": (lambda: hf.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4), "ALiBi"),
    "mpt": (lambda: hf.MptConfig(vocab_size=VOCAB_SIZE, d_model=32, n_layers=2, n_heads=4), "ALiBi"),
    "falcon": (lambda: hf.FalconConfig(**_without("intermediate_size", "num_key_value_heads")), "attention interface"),
    "llama4-tuned": (lambda: hf.Llama4TextConfig(**_LLAMA4, attn_temperature_tuning=True), "attn_temperature_tuning"),
    "no-layers": (lambda: hf.LlamaConfig(**_COMMON | {"num_hidden_layers": 0}), "0 layers"),
    "no-context": (lambda: hf.LlamaConfig(**_COMMON | {"max_position_embeddings": 0}), "0 as max_position_embeddings"),
    "gpt-oss": (lambda: hf.GptOssConfig(**_COMMON, head_dim=8, num_local_experts=4, num_experts_per_tok=2), "s_aux"),
}


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _COMMON.items() if name not in names}


def build(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A causal language model of this config with random weights, eager attention, in evaluation mode."""
    torch.manual_seed(seed)
    auto_model: Any = hf.AutoModelForCausalLM
    model = auto_model.from_config(config, attn_implementation="eager").to(dtype).eval()
    model.set_experts_implementation("eager")  # the default for mixtures of experts has no float64
    return model


_REPLACED = ("LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")

# Their own norms or routers, which stay, go through float32: where the last bit before differs, that may round.
NARROWED = ("gemma2", "gemma3", "gemma3n", "llama4", "mixtral", "olmo2", "phi3")


def logprobs(hf_model: Any, prompt: list[int]) -> list[float]:
    """The model's own code over the whole prompt, and a log-softmax, all in float64.

    Its own code narrows to float32 inside of softmax and, where ours takes its place, of RMSNorm; here it does not.
    """
    softmax = torch.nn.functional.softmax
    with pytest.MonkeyPatch.context() as patched, torch.inference_mode():
        patched.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, **_: softmax(x, dim=dim))
        for kind in {type(module) for module in hf_model.modules() if type(module).__name__ in _REPLACED}:
            patched.setattr(kind, "forward", _wide_norm)
        logprobs = hf_model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    assert logprobs.dtype == torch.float64
    return [float(logprobs[t - 1, prompt[t]]) for t in range(1, len(prompt))]


def _wide_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    scaled: torch.Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon) * module.weight
    return scaled
