"""OpenAI Agents: triage hands over to a coder, who asks a searcher as a tool; two lines for sojourn.

    sojourn serve MODEL
    python examples/openai_agents_handoff.py --model MODEL --task 'Where is the version set?'

The lines marked with an arrow are all that sojourn adds.
"""

from __future__ import annotations

import argparse
import subprocess

import sojourn  # <── sojourn
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def grep(pattern: str) -> str:
    """Find the lines below the current folder that contain a text."""
    command = ["grep", "-rnIF", "--", pattern, "."]
    return subprocess.run(command, capture_output=True, text=True).stdout[:4000] or "nothing found"


def triage(model: OpenAIChatCompletionsModel) -> Agent:
    searcher = Agent("searcher", instructions="Find it with grep; answer with file and line.",
                     model=model, tools=[grep])  # fmt: skip
    ask_searcher = searcher.as_tool("ask_searcher", "Where in the code something is.")
    coder = Agent("coder", instructions="Ask the searcher, then explain.", model=model, tools=[ask_searcher])
    return Agent("triage", instructions="Hand questions about code to the coder.", model=model,
                 handoffs=[coder])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--task", default="Where is the version set?")
    options = parser.parse_args()
    set_tracing_disabled(True)  # else the framework sends traces to OpenAI
    sojourn.init(options.url)  # <── sojourn
    client = AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none")
    limits = RunConfig(model_settings=ModelSettings(max_tokens=300))
    agent = triage(OpenAIChatCompletionsModel(options.model, client))
    result = Runner.run_sync(agent, options.task, run_config=limits)
    print(f"{result.last_agent.name}: {result.final_output}")


if __name__ == "__main__":
    main()
