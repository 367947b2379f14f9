"""Makes the model *smol*: SmolLM2-135M-Instruct as bfloat16 safetensors, 260 MB, for the demo.

The weights are dequantised from 4 bits, so *smol* answers like the 4-bit model. The ``gguf`` package reads
the tensors, because transformers would need the ``accelerate`` package to read them, and could not save the
result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .gguf_source import find_gguf, import_transformers, load_tokenizer

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def make(directory: Path) -> None:
    """Write config, weights and tokenizer into ``directory``."""
    gguf = find_gguf()
    transformers = import_transformers()
    import torch

    tokenizer = load_tokenizer(gguf)
    config = transformers.AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    weights = _read_weights(gguf, config)
    config.tie_word_embeddings = "lm_head.weight" not in weights
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(
            f"{gguf.name} is not the expected Llama: missing {missing}, unexpected {unexpected}"
        )
    model.tie_weights()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _read_weights(gguf: Path, config: Any) -> dict[str, Any]:
    """Return the tensors of the file in bfloat16, by their names in transformers' Llama."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in GGUFReader(gguf).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.weight"
            if parts[2] in heads:
                values = _unpermute(values, heads[parts[2]])
        elif parts[0] in _TOP_NAMES:
            name = f"{_TOP_NAMES[parts[0]]}.weight"
        else:
            continue  # tensors such as rope_freqs follow from the config
        weights[name] = values.to(torch.bfloat16)
    return weights


def _unpermute(values: Any, num_heads: int) -> Any:
    """Return the rows of a query or key projection in transformers' order. GGUF stores the two rows of a
    rotary pair beside each other. transformers stores one of them in each half of the head."""
    rows, columns = values.shape
    half = rows // num_heads // 2
    return values.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)
