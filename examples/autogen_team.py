"""Two AutoGen agents, a writer with a tool and a critic, taking turns; two lines for sojourn.

    sojourn serve MODEL
    python examples/autogen_team.py --model MODEL --task 'Explain what README.md promises.'

The lines marked with an arrow are all that sojourn adds.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import sojourn  # <── sojourn
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def read_file(path: str) -> str:
    """Read a file below the current folder."""
    return Path(path).read_text()[:4000]


async def run(url: str, model: str, task: str) -> None:
    abilities = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown"}
    client = OpenAIChatCompletionClient(
        model=model,
        base_url=f"{url}/v1",
        api_key="none",
        max_tokens=300,
        model_info={**abilities, "structured_output": False},
    )
    prompt = "You draft, from the files."
    writer = AssistantAgent(
        "writer", client, tools=[read_file], system_message=prompt, reflect_on_tool_use=True
    )
    critic = AssistantAgent("critic", client, system_message="You find one flaw, or say APPROVED.")
    stop = TextMentionTermination("APPROVED", sources=["critic"]) | MaxMessageTermination(12)
    result = await RoundRobinGroupChat([writer, critic], termination_condition=stop).run(task=task)
    for message in result.messages:
        print(f"{message.source}: {message.to_text()}")
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--task", default="Explain what README.md promises.")
    options = parser.parse_args()
    sojourn.init(options.url)  # <── sojourn
    asyncio.run(run(options.url, options.model, options.task))


if __name__ == "__main__":
    main()
