"""A complete agent on the openai client, with two tools; three lines for sojourn.

    sojourn serve smol                       # better, a model that calls tools
    python examples/openai_loop.py --model smol --task 'What time is it, and who am I?'
Models such as tiny and smol hardly call a tool; with --rehearse N the script adds N calls. The lines marked
with an arrow are all that sojourn adds. @sojourn.tool on run_tool would report tools sooner and more exactly.
"""

from __future__ import annotations

import argparse
import json
import subprocess

import sojourn  # <── sojourn
from openai import OpenAI

COMMANDS = {"clock": ["date", "-u"], "whoami": ["id", "-un"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Runs {' '.join(command)}."}}
    for name, command in COMMANDS.items()
]


def run_tool(call: dict) -> str:
    command = COMMANDS.get(call["function"]["name"], ["false"])
    return subprocess.run(command, capture_output=True, text=True).stdout


@sojourn.program  # <── sojourn: every call of it is one agent run
def agent(client: OpenAI, model: str, task: str, rehearse: int) -> list[dict]:
    messages = [{"role": "user", "content": task}]
    for turn in range(12):
        answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=64)
        message = answer.choices[0].message.model_dump(exclude_none=True)
        if turn < rehearse:
            function = {"name": list(COMMANDS)[turn % 2], "arguments": "{}"}
            message["tool_calls"] = [{"id": f"r{turn}", "type": "function", "function": function}]
        messages.append(message)
        if not (calls := message.get("tool_calls")):
            break
        messages += [{"role": "tool", "tool_call_id": c["id"], "content": run_tool(c)} for c in calls]
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--task", default="What time is it?")
    parser.add_argument("--rehearse", type=int, default=0, metavar="N")
    options = parser.parse_args()
    sojourn.init(options.url)  # <── sojourn: from here on, requests to this host carry their program
    client = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    print(json.dumps(agent(client, options.model, options.task, options.rehearse), indent=1))


if __name__ == "__main__":
    main()
