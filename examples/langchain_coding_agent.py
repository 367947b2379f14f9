"""A coding agent on LangChain, with file and shell tools; two lines for sojourn.

    sojourn serve MODEL                      # one that calls tools, with vLLM's --tool-call-parser for it
    python examples/langchain_coding_agent.py --model MODEL --task 'Fix the failing test.' path/to/repository

The lines marked with an arrow are all that sojourn adds.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import sojourn  # <── sojourn
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

PROMPT = "You fix code. Look first, change one thing at a time, run the tests, then say what you did."


def tools_in(root: Path) -> list:
    @tool
    def read_file(path: str) -> str:
        """Read a file of the repository."""
        return (root / path).read_text()

    @tool
    def write_file(path: str, text: str) -> str:
        """Replace a file of the repository."""
        (root / path).write_text(text)
        return f"{path}: {len(text)} characters"

    @tool
    def shell(command: str) -> str:
        """Run a command in the repository. Returns its exit code and output."""
        done = subprocess.run(command, shell=True, cwd=root, capture_output=True, text=True, timeout=300)
        return f"exit {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}"

    return [read_file, write_file, shell]


@wrap_tool_call
def errors_for_the_model(request, handler):
    """Return a tool's exception to the model as text, since it would otherwise end the run."""
    try:
        return handler(request)
    except Exception as error:
        return ToolMessage(f"{type(error).__name__}: {error}", tool_call_id=request.tool_call["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--task", default="Make the tests pass.")
    options = parser.parse_args()
    sojourn.init(options.url)  # <── sojourn
    model = ChatOpenAI(model=options.model, base_url=f"{options.url}/v1", api_key="none", max_tokens=512)
    tools = tools_in(options.repository)
    agent = create_agent(model, tools, system_prompt=PROMPT, middleware=[errors_for_the_model], name="coder")
    result = agent.invoke({"messages": [("user", options.task)]}, {"recursion_limit": 60})
    print(result["messages"][-1].content)


if __name__ == "__main__":
    main()
