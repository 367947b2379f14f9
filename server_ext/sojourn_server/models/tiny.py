"""Makes the model *tiny*: a random Llama with the demo model's tokenizer, 10 MB, for tests.

The model is fast, and its outputs are meaningless. An engine handles the model's KV blocks like the KV blocks
of any other model.
"""

from __future__ import annotations

from pathlib import Path

from .gguf_source import find_gguf, import_transformers, load_tokenizer

SEED = 20250717
MAX_POSITIONS = 32_768


def make(directory: Path) -> None:
    """Write config, weights (bfloat16) and tokenizer into ``directory``. The weights are always the same."""
    transformers = import_transformers()
    import torch

    tokenizer = load_tokenizer(find_gguf())
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that the CPU attention backend supports
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        rope_theta=100_000.0,
    )
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(SEED)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
