"""Models of several kinds say what they say on stock, with leases, with host memory and with programs placed.

Small and random, in float32 at temperature 0; each next token depends on all tokens before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from async_scheduling import asynchronous_scheduling
from engine_tools import (
    VOCABULARY,
    new_processes,
    save_random_model,
    save_tokenizer,
    with_tiers,
    with_vllm_tier,
)
from multi_turn_programs import OUTPUT_TOKENS, arm, first_prompt, gaps_to_the_best, generate, usual_hint

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

HOST_BYTES = 64 << 20
MOST_OFF_BFLOAT16 = 0.5
"""Nats by which a token may be less likely than the likeliest one."""
GROUP_BLOCKS = 70
"""Of 32 tokens, for a model with two groups of KV caches."""
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "initializer_range": 0.15,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding windows and full attention": ("Gemma3Text", {"sliding_window": 64, "sliding_window_pattern": 2}),
    # As large as vLLM's kernels for the CPU need them, and with keys and values of a token so large that a
    # block, which has as many bytes as a state, has few tokens.
    "states and full attention": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
}
"""The model's class in transformers, and what it has besides ``COMMON``."""


def flags_of_cpu() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.is_file() else ""


@pytest.fixture(scope="module")
def make_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``make_model(kind)``: the directory of a model of ``KINDS``."""
    import transformers

    made: dict[str, str] = {}

    def make(kind: str) -> str:
        if kind not in made:
            name, more = KINDS[kind]
            config = getattr(transformers, f"{name}Config")(**{**COMMON, **more})
            causal = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
            target = tmp_path_factory.mktemp("model")
            made[kind] = save_random_model(partial(causal, config), target, tiny_model)
        return made[kind]

    return make


@pytest.fixture(scope="module")
def in_a_process(engine_environment: None) -> Iterator[Callable[..., Any]]:
    """``in_a_process(call, *arguments, **more)``: what ``call`` returns in a new process."""
    with new_processes() as run:
        yield run


def says_what_stock_says(
    model: str,
    programs: int = 8,
    *,
    loads: bool = True,
    stores: bool = True,
    policies: Sequence[str] = ("continuum", "mori"),
    run: Callable[..., tuple[list[list[int]], Any]] = generate,
    **settings: Any,
) -> None:
    """``loads``: whether host memory has what the device lost. ``stores``: whether anything is copied there.
    ``run`` is ``generate``, or calls it."""
    settings = {"programs": programs, "turns": 2, **settings}
    stock, _ = run(model, None, hints=False, **settings)
    assert len({tuple(tokens[:OUTPUT_TOKENS]) for tokens in stock}) == programs, "first turns must differ"
    for policy in policies:
        tiers = with_tiers(host_bytes=HOST_BYTES) if policy == "mori" else {}
        tokens, report = run(model, {"policy": policy}, hints=True, **tiers, **settings)
        assert tokens == stock, policy
        kinds = {decision["kind"] for decision in report["decisions"]}
        assert kinds & {"keep", "to_host"}, policy
    assert (report["stats"]["tiers"]["moves"].get("stored", 0) > 0) is stores
    assert (report["stats"]["host_tokens"] > 0) is loads
    assert not loads or report["stats"]["lost_tokens"] == {}


@pytest.mark.nightly
@pytest.mark.skipif("avx512f" not in flags_of_cpu(), reason="vLLM's CPU engine needs AVX-512 for KV in fp8")
def test_kv_in_fp8_says_what_it_says_on_stock(loud_model: str) -> None:
    says_what_stock_says(loud_model, policies=["mori"], kv_cache_dtype="fp8")


def test_adapters_say_what_they_say_on_stock(loud_model: str, tmp_path: Path) -> None:
    """Two programs of each prompt: a block's key has the adapter's name, else they would share KV."""
    adapters = [make_adapter(tmp_path / str(seed), seed) for seed in (1, 2)]
    says_what_stock_says(loud_model, policies=["mori"], enable_lora=True, max_loras=2, adapters=adapters)


def test_an_adapter_that_is_loaded_again_is_not_answered_from_its_old_kv(
    loud_model: str, tmp_path: Path
) -> None:
    """Other prompts take the device's blocks meanwhile; host memory has copies of them."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    tiers = with_tiers(host_bytes=HOST_BYTES)
    with arm(loud_model, {"policy": "mori"}, enable_lora=True, max_loras=2, **tiers) as llm:

        def say(lora: Any, prompt: int = 0, program: int = 0) -> list[int]:
            extra = {"agentic_context": usual_hint(program)}
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args=extra)
            prompts = [{"prompt_token_ids": first_prompt(prompt)}]
            (answer,) = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
            return list(answer.outputs[0].token_ids)

        told = [say(LoRARequest("same", 1, make_adapter(tmp_path / "same", 0)))]
        for seed, in_request in ((1, False), (2, True)):
            adapter = LoRARequest("same", 1, make_adapter(tmp_path / "same", seed), load_inplace=in_request)
            if not in_request:
                llm.llm_engine.add_lora(LoRARequest("same", 1, adapter.lora_path, load_inplace=True))
            for other in range(1, 9):
                say(None, other, other)
            told.append(say(adapter))
            alone = LoRARequest(f"alone {seed}", 1 + seed, make_adapter(tmp_path / str(seed), seed))
            assert told[-1] == say(alone, program=10 + seed), f"loaded by a request: {in_request}"
        assert len({tuple(tokens) for tokens in told}) == 3, "the adapters must differ"


@pytest.mark.nightly
def test_images_say_what_they_say_on_stock(tiny_model: str, tmp_path: Path) -> None:
    """Two programs of each prompt, with an image each: a block's key has the image's hash, else they would
    share KV."""
    from PIL import Image

    model = make_model_with_images(tiny_model, tmp_path / "model")
    images = [Image.new("RGB", (56, 56), colour) for colour in ("navy", "orange")]
    says_what_stock_says(model, policies=["mori"], images=images)


def make_model_with_images(tokenizer: str, target: Path) -> str:
    """The directory of a small BLIP-2, which puts an image before its prompt. Most other models of vLLM with
    images need torchvision."""
    import torch
    import transformers

    words = save_tokenizer(tokenizer, target)
    words.add_special_tokens({"additional_special_tokens": ["<image>"]})
    place = words.convert_tokens_to_ids("<image>")
    said = transformers.LlamaConfig(**{**COMMON, "vocab_size": place + 1})
    said.architectures = ["LlamaForCausalLM"]
    size = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "initializer_range": COMMON["initializer_range"],  # by default 1e-10: the image would not matter
    }  # fmt: skip
    config = transformers.Blip2Config(
        vision_config={**size, "image_size": 56, "patch_size": 14},
        qformer_config={**size, "encoder_hidden_size": 64, "vocab_size": 16},
        text_config=said.to_dict(),
        num_query_tokens=16,
        image_token_index=place,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model = transformers.Blip2ForConditionalGeneration(config).to(torch.float32)
        for weights in (model.query_tokens, model.language_projection.weight):
            weights.normal_()  # so that the answer depends on the image
        model.save_pretrained(target)
    # Before transformers 5 the only one, which needs no torchvision either, has the shorter name.
    sees = getattr(transformers, "BlipImageProcessorPil", None) or transformers.BlipImageProcessor
    transformers.Blip2Processor(
        sees(size={"height": 56, "width": 56}), words, num_query_tokens=16
    ).save_pretrained(target)
    return str(target)


@pytest.mark.nightly
def test_speculative_decoding_says_what_it_says_on_stock(
    loud_model: str, in_a_process: Callable[..., Any]
) -> None:
    """Each engine in a process of its own: vLLM's second engine with it fails in the same process."""
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    says_what_stock_says(
        loud_model, policies=["mori"], run=partial(in_a_process, generate), speculative_config=ngram
    )


def make_adapter(target: Path, seed: int) -> str:
    """A LoRA adapter of rank 8 for the loud model, as peft writes it."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(2):
        for name, size in (("q_proj", 64), ("v_proj", 32)):
            of = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{of}.lora_A.weight"] = torch.randn(8, 64, generator=draw) * 0.3
            weights[f"{of}.lora_B.weight"] = torch.randn(size, 8, generator=draw) * 0.3
    target.mkdir(exist_ok=True)
    save_file(weights, str(target / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (target / "adapter_config.json").write_text(json.dumps(config))
    return str(target)


def test_a_window_and_full_attention_say_what_they_say_on_stock(make_model: Callable[[str], str]) -> None:
    """Without tiers each kind is a group: leases pin what the next turn needs of each."""
    model = make_model("sliding windows and full attention")
    stock, _ = generate(model, None, hints=False, blocks=GROUP_BLOCKS)
    found = {}
    for policy in ("observe", "continuum"):
        tokens, report = generate(model, {"policy": policy}, hints=True, blocks=GROUP_BLOCKS)
        assert tokens == stock, policy
        found[policy] = report["stats"]["device_tokens"]
    assert found["continuum"] > found["observe"]


@pytest.mark.nightly
def test_a_model_with_states_continues_from_the_right_state(
    make_model: Callable[[str], str], in_a_process: Callable[..., Any]
) -> None:
    """In bfloat16, the only type of vLLM's kernel for linear attention on the CPU, the batch changes late
    digits and so a token here and there. So each token is compared with the likeliest one after its context:
    after a wrong state or wrong KV it would be any of 4,096. Each engine is in a process of its own, as vLLM
    needs for such experts."""
    model = make_model("states and full attention")

    def share_off(produced: list[list[int]]) -> float:
        gaps = in_a_process(gaps_to_the_best, model, produced, dtype="bfloat16")
        return sum(gap > MOST_OFF_BFLOAT16 for gap in gaps) / len(gaps)

    engine = {"blocks": 36, "dtype": "bfloat16"}
    stock, _ = in_a_process(generate, model, None, hints=False, **engine)
    assert len({tuple(tokens) for tokens in stock}) == len(stock), "the programs must differ"
    found = {}
    for policy in ("observe", "continuum"):
        tokens, report = in_a_process(generate, model, {"policy": policy}, hints=True, **engine)
        found[policy] = report["stats"]["device_tokens"]
        if policy == "observe":
            assert tokens == stock, "its steps are stock's"
        assert share_off(tokens) < 0.02
    assert found["continuum"] > found["observe"]
    assert share_off(stock[1:2]) > 0.5, "what another program said, after this one's prompt"


def test_windows_beside_full_attention_are_found_in_host_memory(
    make_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of layer is a group of KV caches. Host memory keeps all of a context's blocks with full
    attention, and of the windows those at the end of a turn. It has as many blocks as fit."""
    from sojourn_server.vllm import kv_offload_connector

    opened = []
    open_device_backend = kv_offload_connector.open_device_backend

    def opening(caches: Any, blocks: int, slots: int) -> Any:
        memory = open_device_backend(caches, blocks, slots)
        opened.append((slots, HOST_BYTES // memory.block_bytes))
        return memory

    monkeypatch.setattr(kv_offload_connector, "open_device_backend", opening)
    says_what_stock_says(
        make_model("sliding windows and full attention"), policies=["mori"], blocks=GROUP_BLOCKS
    )
    ((slots, fit),) = opened
    assert slots == fit


def test_windows_beside_full_attention_are_found_in_vllms_host_memory(
    make_model: Callable[[str], str],
) -> None:
    model = make_model("sliding windows and full attention")
    tokens, _ = generate(model, None, hints=False, blocks=GROUP_BLOCKS)
    with asynchronous_scheduling():
        found, report = generate(
            model, {"policy": "sojourn"}, hints=True, blocks=GROUP_BLOCKS, **with_vllm_tier(HOST_BYTES)
        )
    assert found == tokens
    assert report["stats"]["host_tokens"] > 1000
    assert report["stats"]["lost_tokens"] == {}


def test_states_come_back_from_vllms_host_memory(
    make_model: Callable[[str], str], in_a_process: Callable[..., Any]
) -> None:
    """Our own tiers refuse it. Judged as above, in bfloat16."""
    model = make_model("states and full attention")
    tokens, report = in_a_process(
        generate, model, {"policy": "observe"}, hints=True, blocks=36, dtype="bfloat16",
        **with_vllm_tier(4 * HOST_BYTES),
    )  # fmt: skip
    gaps = in_a_process(gaps_to_the_best, model, tokens, dtype="bfloat16")
    assert sum(gap > MOST_OFF_BFLOAT16 for gap in gaps) / len(gaps) < 0.02
    assert report["stats"]["host_tokens"] > 1000
