"""Prediction of output lengths from hidden states on a real engine, against survival and the mean.

    python benchmarks/learned_length_prediction.py --out benchmarks/results

``smol`` answers ``--requests`` chat requests of eight kinds (a greeting, a definition, a list, a story, …),
equally many of each and all on different topics, in an order drawn from the seed. Each answer ends by itself,
or at ``--longest`` tokens. The engine runs ``tetris-learned`` and records the network's predictions, their
times, and the final lengths. No prediction uses the answer that it predicts. The network is compared with
``survival`` and with the mean, at the same positions of the later half of the answers. These two predict from
all requests (``of all``) and from requests of the same kind (``by kind``), which agents may declare. The
network never gets the kind. All predictors learn online, from both halves.

Then the cost is measured: the time of calls on the engine's thread (``--calls`` steps of 20 ms, while a
network trains with its share of a core, with a whole core, or not at all), and the processor time of the
trainer thread in the run above. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import httpx
from length_prediction_error import Answer, measures
from result_pages import FIRST_WORDS, made_by, marked, write_page
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sojourn_server.cli.console import write_json
from sojourn_server.policies.forecasting.output_length_prediction import (
    MIN_OUTPUTS,
    QUANTILE_POINTS,
    MeanLengthPrediction,
    OutputLengthView,
    SurvivalPrediction,
    clamp_remaining,
)
from sojourn_server.simulator.report.results_file import Provenance, made_with

KINDS = {
    "greeting": "Say hello to {}.",
    "yes-or-no": "Is {} older than a hundred years? Answer yes or no.",
    "definition": "Define {} in one sentence.",
    "list": "Name five things that have to do with {}.",
    "explanation": "Explain {} to a child, step by step.",
    "essay": "Write a long essay about {}, with an introduction, three parts and a conclusion.",
    "story": "Write a story in which {} plays a part.",
    "code": "Write a Python function that counts how often {} occurs in a text, with tests.",
}
TOPICS = (
    "the steam engine", "a lighthouse", "the moon", "bread", "a bicycle", "rain", "the violin", "chess",
    "a river", "the compass", "glass", "a library", "the heart", "salt", "a bridge", "the telephone",
    "wool", "a volcano", "the calendar", "tea", "a map", "the lemon", "paper", "a clock",
    "a sailing ship", "the desert", "a candle", "honey", "the alphabet", "a mirror", "snow", "a tunnel",
    "the potato", "a kite", "the piano", "coal", "an island", "the needle", "a windmill", "the sparrow",
)  # fmt: skip
BLOCK_TOKENS = 32
BATCH = 16
STEP_S = 0.02
PREDICTORS = ("network", "survival, of all", "mean, of all", "survival, by kind", "mean, by kind")


def load(requests: int, seed: int) -> list[tuple[str, str]]:
    """Return (kind, prompt) of each request, with equally many of each kind. All prompts are different."""
    draw = random.Random(seed)
    dealt = [
        (kind, text.format(TOPICS[number]))
        for kind, text in KINDS.items()
        for number in range(requests // len(KINDS))
    ]
    draw.shuffle(dealt)
    return dealt


def serve(
    requests: Sequence[tuple[str, str]], options: argparse.Namespace, recording: Path
) -> dict[str, Any]:
    """Run all requests. Return the engine's final statistics of its network."""
    from sojourn_server.launch.engine_server import EngineServer

    flags = (
        "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(1 << 30),
        "--max-model-len", "2048", "--max-num-seqs", str(BATCH), "--max-num-batched-tokens", "512",
        "--num-gpu-blocks-override", "1024", "--sojourn-option", f"recording_file={recording}",
        "--shutdown-timeout", "20",
    )  # fmt: skip
    with EngineServer("smol", policy="tetris-learned", serve_args=flags) as server:

        def ask(numbered: tuple[int, tuple[str, str]]) -> None:
            number, (_, prompt) = numbered
            body = {
                "model": "smol", "messages": [{"role": "user", "content": prompt}],
                "max_tokens": options.longest, "temperature": 0.7, "seed": options.seed + number,
            }  # fmt: skip
            name = {"X-Session-Id": f"request-{number}"}
            answer = httpx.post(
                f"{server.url}/v1/chat/completions", json=body, headers=name, timeout=900.0, trust_env=False
            )
            answer.raise_for_status()

        began_s = time.monotonic()
        with ThreadPoolExecutor(BATCH) as pool:
            for _ in track(pool.map(ask, enumerate(requests)), "answers", total=len(requests)):
                pass
        took_s = time.monotonic() - began_s
        stats = httpx.get(f"{server.url}/sojourn/v1/stats", timeout=30.0, trust_env=False).json()
    return {"seconds": took_s, **stats["output_lengths"]}


def answers(
    recording: Path, requests: Sequence[tuple[str, str]]
) -> tuple[dict[str, list[Answer]], list[int]]:
    """Return each predictor's predictions for the later half of the answers, and the lengths of all
    answers."""
    from sojourn_server.recording.recording_file import RecordingReader

    number_of: dict[int, int] = {}
    guesses: dict[int, list[tuple[int, tuple[float, ...]]]] = defaultdict(list)
    known: dict[str, list[int]] = defaultdict(list)
    said: dict[int, list[tuple[str, int, tuple[float, ...]]]] = defaultdict(list)
    found: dict[str, list[Answer]] = {name: [] for name in PREDICTORS}
    lengths: list[int] = []
    for record in RecordingReader(recording, allow_unfinished=True).records():
        if record.op == "arrive":
            program_id = record.facts[2]
            if program_id is not None:
                number_of[record.answer[0]] = int(program_id.rpartition("-")[2])
        elif record.op == "guess":
            request, at_tokens, left, options = record.facts
            if request not in number_of or (guesses[request] and guesses[request][-1][0] >= at_tokens):
                continue
            guesses[request].append((at_tokens, tuple(left)))
            kind = requests[number_of[request]][0]
            allowed = options["most_tokens"]
            may = OutputLengthView("", at_tokens, allowed)
            said[request].append(
                ("network", at_tokens, tuple(clamp_remaining(tokens, may) for tokens in left))
            )
            for of, samples in (("of all", known[""]), ("by kind", known[kind])):
                view = may._replace(lengths=samples if len(samples) >= MIN_OUTPUTS else ())
                for name, predictor in (
                    ("survival", SurvivalPrediction(hints=False)),
                    ("mean", MeanLengthPrediction()),
                ):
                    left_without = predictor.remaining(view, 0.0)
                    if left_without is not None:
                        said[request].append((f"{name}, {of}", at_tokens, left_without))
        elif record.op == "end" and record.facts[0] in number_of:
            request, tokens = record.facts[0], record.facts[4]
            kind = requests[number_of[request]][0]
            insort(known[""], tokens)
            insort(known[kind], tokens)
            lengths.append(tokens)
            if len(lengths) <= len(requests) // 2:
                continue
            # Only positions at which all predictors predict, so that all are compared on the same ones.
            by_place: dict[int, dict[str, tuple[float, ...]]] = defaultdict(dict)
            for name, at_tokens, left in said[request]:
                by_place[at_tokens][name] = left
            for at_tokens, by_name in by_place.items():
                if len(by_name) == len(PREDICTORS) and at_tokens < tokens:
                    for name, left in by_name.items():
                        found[name].append(Answer(at_tokens, left, tokens - at_tokens))
    return found, lengths


def calls(steps: int) -> dict[str, Any]:
    """Return how many seconds calls take on the engine's thread, for each share of a core that training may
    use."""
    import torch
    from sojourn_server.predictors.background_trainer import CPU_SHARE, BackgroundTrainer

    result: dict[str, Any] = {}
    for name, share in (("no training", 0.0), ("its share", CPU_SHARE), ("a whole core", 1.0)):
        background = BackgroundTrainer(576, model="none", points=QUANTILE_POINTS, share=share)
        taken: list[float] = []
        for step in track(range(steps), f"calls, {name}"):
            states = torch.randn(BATCH, 576)
            started = time.perf_counter()
            if step % 16 == 0:
                ids = [(f"{step // 256}-{row}", step % 256) for row in range(BATCH)]
                background.queue_hidden_states(ids, states)
            if step % 256 == 255:
                for row in range(BATCH):
                    background.ended(f"{step // 256}-{row}", 300)
            background.take_predictions()
            taken.append(time.perf_counter() - started)
            time.sleep(max(0.0, STEP_S - taken[-1]))
        result[name] = {
            "mean_s": fmean(taken),
            "p99_s": quantiles(taken, n=100)[-1],
            "max_s": max(taken),
            "batches": background.state()["batches"],
        }
        background.stop()
    return result


ERRORS = ("predictor", "answers", "median", "mean", "tokens off", "pinball", "coverage off", "bias")
COSTS = ("training", "batches", "mean µs", "P99 µs", "longest µs")


def errors(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of prediction errors: one row per predictor."""
    lines = []
    for name, of in result["second_half"].items():
        figures = (
            f"{of['answers']:,}", f"{of['log_error_median']:.2f}", f"{of['log_error_mean']:.2f}",
            f"{of['absolute_tokens']:.0f}", f"{of['pinball_tokens']:.0f}", f"{of['coverage_off']:.2f}",
            f"{of['bias']:.2f}",
        )  # fmt: skip
        lines.append((name, *figures))
    return lines


def costs(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table of call times: one row per share of a core that training may use."""
    return [
        (
            name, f"{of['batches']:.0f}", f"{1e6 * of['mean_s']:.1f}", f"{1e6 * of['p99_s']:.0f}",
            f"{1e6 * of['max_s']:.0f}",
        )
        for name, of in result["calls"].items()
    ]  # fmt: skip


def summary(result: dict[str, Any]) -> str:
    """Return a text on the run and on the processor time of the network's thread."""
    of, engine = result["lengths"], result["engine"]
    network = engine["network"]
    cut = f"{of['cut']} cut at {of['longest']:,}"
    written = f"{of['answers']} answers, of {of['median']:.0f} tokens in the median, {cut}"
    learned = f"{network['examples']:,.0f} hidden states, {network['batches']:,.0f} batches"
    share = network["seconds"] / engine["seconds"]
    return (
        f"{written}, in {engine['seconds']:.0f} s; {learned}, {network['seconds']:.1f} s of processor time: "
        f"{share:.1%} of one core."
    )


def page(result: dict[str, Any], made: Provenance, wall_s: float) -> str:
    """Return the result page in Markdown, without hand-written text."""
    return f"""# Output lengths predicted from hidden states

Generated by the command below, but for what is between the marks.

{made_by(made, wall_s)}

{summary(result)}

Second half of the answers, median and mean of |ln(predicted ÷ actual)| of the whole answer, tokens that the
middle of the prediction is off, quantile loss in tokens, the most that a quantile's coverage is off, and mean
predicted ÷ mean actual tokens left:

{marked(ERRORS, errors(result))}

How long the calls of one step keep the engine's thread:

{marked(COSTS, costs(result))}

{{by hand}}
"""


def main() -> None:
    """Run, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=320, help="at most 320: of each kind 40 topics")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--calls", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write learned_length_prediction.json and .md here")
    options = parser.parse_args()
    began_s, console = time.monotonic(), Console(width=140)
    if not len(KINDS) <= options.requests <= len(KINDS) * len(TOPICS):
        parser.error(f"--requests {options.requests}; expected {len(KINDS)} to {len(KINDS) * len(TOPICS)}")
    requests = load(options.requests, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording.gz"
        network = serve(requests, options, recording)
        found, lengths = answers(recording, requests)
    ordered = sorted(lengths)
    result = {
        "seed": options.seed,
        "lengths": {
            "answers": len(ordered),
            "median": median(ordered),
            "longest": ordered[-1],
            "cut": sum(tokens >= options.longest for tokens in ordered),
        },
        "engine": network,
        "second_half": {name: measures(of) for name, of in found.items() if of},
        "calls": calls(options.calls),
    }
    for head, lines in ((ERRORS, errors(result)), (COSTS, costs(result))):
        table = Table(*head)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    console.print(summary(result), highlight=False)
    console.print(network, highlight=False)
    if options.out is not None:
        made = made_with(sys.argv)
        document = {"command": f"python benchmarks/{made.command}", "machine": made.machine,
                    "versions": made.versions, **result}  # fmt: skip
        write_json(document, str(options.out / "learned_length_prediction.json"))
        wall_s = time.monotonic() - began_s
        write_page(options.out / "learned_length_prediction.md", page(result, made, wall_s), FIRST_WORDS)


if __name__ == "__main__":
    main()
