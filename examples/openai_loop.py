"""A whole agent on the openai client: two tools, two lines for sojourn.

    sojourn serve smol                       # or any model that calls tools
    python examples/openai_loop.py --model smol --task 'What time is it, and who am I?'
A model such as tiny talks nonsense and calls no tool; --rehearse N calls the tools for it, N times.
"""

from __future__ import annotations

import argparse
import json
import subprocess

import sojourn
from openai import OpenAI

COMMANDS = {"clock": ["date", "-u"], "whoami": ["id", "-un"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Runs {' '.join(command)}."}}
    for name, command in COMMANDS.items()
]


def run_tool(call: dict) -> str:
    command = COMMANDS.get(call["function"]["name"], ["false"])
    # Optional: without it the server reads the tool from the model's output and times the gap itself.
    with sojourn.tool_call(call["function"]["name"], call["id"]):
        return subprocess.run(command, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--task", default="What time is it?")
    parser.add_argument("--rehearse", type=int, default=0, metavar="N")
    options = parser.parse_args()
    sojourn.init(options.url)  # <── sojourn: once a process
    client = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    messages = [{"role": "user", "content": options.task}]
    with sojourn.program("openai-loop"):  # <── sojourn: once a run
        for turn in range(12):
            answer = client.chat.completions.create(
                model=options.model, messages=messages, tools=TOOLS, max_tokens=64
            )
            message = answer.choices[0].message.model_dump(exclude_none=True)
            calls = message.get("tool_calls") or []
            if not calls and turn < options.rehearse:
                function = {"name": list(COMMANDS)[turn % 2], "arguments": "{}"}
                calls = message["tool_calls"] = [{"id": f"r{turn}", "type": "function", "function": function}]
            messages.append(message)
            if not calls:
                break
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": run_tool(c)} for c in calls]
    print(json.dumps(messages, indent=1))


if __name__ == "__main__":
    main()
