"""Programs of several turns on a real engine in this process, in float32 at temperature 0."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine_tools import float32_engine, scheduler_of

PROGRAMS = 8
TURNS = 3
OUTPUT_TOKENS = 48
FIRST_PROMPT_TOKENS = 200
LATER_PROMPT_TOKENS = 40
BLOCKS = 36
"""KV blocks of 32 tokens, which hold about two and a half of the eight contexts."""
WORDS = 4000
"""Number of different tokens in prompts. The smallest vocabulary of the models is slightly larger."""


@contextmanager
def arm(model: str, sojourn: dict[str, Any] | None, blocks: int = BLOCKS, **settings: Any) -> Iterator[Any]:
    """An engine for one arm."""
    if sojourn is not None:
        settings["scheduler_cls"] = "sojourn_server.vllm.scheduler.make_scheduler"
        settings["additional_config"] = {"sojourn": {"strict": True, **sojourn}}
    with float32_engine(
        model,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=blocks + 1,
        disable_log_stats=True,
        **settings,
    ) as llm:
        yield llm


def usual_hint(program: int) -> str:
    """The context of an honest client."""
    return json.dumps({"program_id": f"P{program}", "kv_retention_ttl_seconds": 120})


def lora_request(adapters: Sequence[str], program: int) -> Any:
    """The adapter of a program, for ``LLM.generate``."""
    from vllm.lora.request import LoRARequest

    number = program % len(adapters)
    return LoRARequest(f"adapter {number}", number + 1, adapters[number])


def first_prompt(n: int, *, words: int = WORDS, adapters: int = 1) -> list[int]:
    """First prompt of program ``n``, spread over the vocabulary, so that the model has something to
    continue."""
    return [1 + (7919 * (n // adapters + 1) * (i + 3)) % words for i in range(FIRST_PROMPT_TOKENS)]


def added_tokens(n: int, turn: int, *, words: int = WORDS) -> list[int]:
    """Tokens of a tool's answer after a turn."""
    return [1 + (104_729 * (n + 2) * (i + 5) * (turn + 1)) % words for i in range(LATER_PROMPT_TOKENS)]


def gaps_to_the_best(model: str, produced: Sequence[Sequence[int]], **settings: Any) -> list[float]:
    """Difference in nats between the logprob of the likeliest token and that of each produced token. Stock
    vLLM computes both after the same context, with memory for everything and nothing cached."""
    from vllm import SamplingParams

    gaps = []
    with arm(model, None, blocks=200, **settings) as llm:
        for n, tokens in enumerate(produced):
            context, outputs = first_prompt(n), []
            for turn in range(len(tokens) // OUTPUT_TOKENS):
                outputs += range(len(context), len(context) + OUTPUT_TOKENS)
                context += tokens[turn * OUTPUT_TOKENS : (turn + 1) * OUTPUT_TOKENS]
                context += added_tokens(n, turn)
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
            (answer,) = llm.generate([{"prompt_token_ids": context}], params, use_tqdm=False)
            for place in outputs:
                told = answer.prompt_logprobs[place]
                gaps.append(max(each.logprob for each in told.values()) - told[context[place]].logprob)
    return gaps


def generate(
    model: str,
    sojourn: dict[str, Any] | None,
    *,
    hints: bool | Callable[[int, int], str],
    programs: int = PROGRAMS,
    turns: int = TURNS,
    words: int = WORDS,
    adapters: Sequence[str] = (),
    output_tokens: int = OUTPUT_TOKENS,
    images: Sequence[Any] = (),
    **settings: Any,
) -> tuple[list[list[int]], Any]:
    """All tokens of all turns of all programs, and sojourn's stats and decisions if it is on.

    ``hints`` may be a function that gives the ``agentic_context`` of a program's turn, well formed or not.
    Prompts are made of the first ``words`` tokens of the vocabulary. ``adapters`` are directories of LoRA
    adapters. Programs use them in turn, so as many programs as there are adapters have the same first prompt.
    ``images`` are used in the same way. Each turn has ``output_tokens``. ``settings`` are the engine's,
    besides what all arms have; ``blocks`` is the size of the device's memory.
    """
    from vllm import SamplingParams

    alike = max(1, len(adapters), len(images))
    contexts = [first_prompt(n, words=words, adapters=alike) for n in range(programs)]
    loras = [lora_request(adapters, n) for n in range(programs)] if adapters else None
    produced: list[list[int]] = [[] for _ in range(programs)]
    with arm(model, sojourn, **settings) as llm:
        call = getattr(scheduler_of(llm), "sojourn_call", None)
        for turn in range(turns):
            params = []
            for n in range(programs):
                hint = hints(n, turn) if callable(hints) else usual_hint(n)
                extra = {"agentic_context": hint} if hints else None
                params.append(
                    SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, extra_args=extra)
                )
            prompts: list[dict[str, Any]] = [{"prompt_token_ids": context} for context in contexts]
            for n, prompt in enumerate(prompts) if images else ():
                prompt["multi_modal_data"] = {"image": images[n % len(images)]}
            for n, output in enumerate(llm.generate(prompts, params, use_tqdm=False, lora_request=loras)):
                tokens = list(output.outputs[0].token_ids)
                produced[n].extend(tokens)
                contexts[n] = [*contexts[n], *tokens, *added_tokens(n, turn, words=words)]
        report = None
        if sojourn is not None:
            report = {
                "stats": json.loads(call("stats", "")),
                "decisions": json.loads(call("decisions", '{"limit": 5000}'))["decisions"],
                "ledger": [
                    row
                    for n in range(programs)
                    for row in json.loads(call("program", f'{{"program_id": "P{n}"}}'))["ledger"]
                ]
                if hints is True
                else [],
            }
    return produced, report
