"""A coding agent on LangGraph: it plans, edits, and tests until the tests pass; three lines for sojourn.

    sojourn serve MODEL                      # one that calls tools, with vLLM's --tool-call-parser for it
    python examples/langgraph_coding_agent.py --model MODEL --check 'pytest -q' path/to/repository

The lines marked with an arrow are all that sojourn adds. Tools that the model calls need no such line.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Literal

import sojourn  # <── sojourn
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

PLAN = ("system", "Plan a change to a repository: what to read, what to edit. At most five lines.")
CODE = ("system", "Carry out the plan with the tools. Answer without a tool call when it can be tested.")


class State(MessagesState):
    rounds: int
    passed: bool


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

    return [read_file, write_file]


@sojourn.tool  # <── sojourn: the model does not call it, but the agent's context waits for it too
def run_tests(root: Path, check: str) -> tuple[bool, str]:
    try:
        done = subprocess.run(check, shell=True, cwd=root, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired as error:
        return False, str(error)
    output = (done.stdout + done.stderr)[-4000:]
    return done.returncode == 0, f"`{check}` exits with {done.returncode}:\n{output}"


def build(model: ChatOpenAI, root: Path, check: str, rounds: int):
    tools = tools_in(root)
    coder = model.bind_tools(tools)

    def plan(state: State) -> dict:
        return {"messages": [model.invoke([PLAN, *state["messages"]])], "rounds": 0, "passed": False}

    def code(state: State) -> dict:
        return {"messages": [coder.invoke([CODE, *state["messages"]])]}

    def test(state: State) -> dict:
        passed, output = run_tests(root, check)
        return {"messages": [("user", output)], "rounds": state["rounds"] + 1, "passed": passed}

    # The declared targets make the graph that sojourn reports exact from the first run.
    def after_code(state: State) -> Literal["tools", "test"]:
        return "tools" if state["messages"][-1].tool_calls else "test"

    def after_test(state: State) -> Literal["code", "__end__"]:
        return "__end__" if state["passed"] or state["rounds"] >= rounds else "code"

    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("code", code)
    graph.add_node("tools", ToolNode(tools, handle_tool_errors=True))
    graph.add_node("test", test)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "code")
    graph.add_conditional_edges("code", after_code)
    graph.add_edge("tools", "code")
    graph.add_conditional_edges("test", after_test)
    return graph.compile(name="coder")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--task", default="Make the tests pass.")
    parser.add_argument("--check", default="python -m unittest", help="runs the tests")
    parser.add_argument("--rounds", type=int, default=5, help="of editing and testing, at most")
    options = parser.parse_args()
    sojourn.init(options.url)  # <── sojourn
    model = ChatOpenAI(model=options.model, base_url=f"{options.url}/v1", api_key="none", max_tokens=1024)
    graph = build(model, options.repository, options.check, options.rounds)
    result = graph.invoke({"messages": [("user", options.task)]}, {"recursion_limit": 100})
    print("passed" if result["passed"] else "failed", "after", result["rounds"], "rounds")
    print(result["messages"][-1].content)


if __name__ == "__main__":
    main()
