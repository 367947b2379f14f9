"""A planner and a worker on LangGraph: the worker loops until the planner is content; two lines for sojourn.

    sojourn serve MODEL
    python examples/langgraph_planner_worker.py --model MODEL --task 'Write a haiku about caches.'

The lines marked with an arrow are all that sojourn adds.
"""

from __future__ import annotations

import argparse
from typing import Annotated, Literal, TypedDict

import sojourn  # <── sojourn
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages


class State(TypedDict):
    messages: Annotated[list, add_messages]
    rounds: int


def build(model: ChatOpenAI):
    def plan(state: State) -> dict:
        ask = ("system", "You plan. Give the next step in one sentence, or say DONE.")
        return {"messages": [model.invoke([ask, *state["messages"]])], "rounds": state["rounds"] + 1}

    def work(state: State) -> dict:
        ask = ("system", "You do the step you are given and show the result.")
        return {"messages": [model.invoke([ask, *state["messages"]])]}

    def enough(state: State) -> Literal["work", "__end__"]:
        return "__end__" if state["rounds"] > 5 or "DONE" in state["messages"][-1].content else "work"

    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("work", work)
    graph.add_edge(START, "plan")
    graph.add_conditional_edges("plan", enough)
    graph.add_edge("work", "plan")
    return graph.compile(name="planner-worker")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--task", default="Write a haiku about caches.")
    options = parser.parse_args()
    sojourn.init(options.url)  # <── sojourn
    model = ChatOpenAI(model=options.model, base_url=f"{options.url}/v1", api_key="none", max_tokens=200)
    result = build(model).invoke({"messages": [("user", options.task)], "rounds": 0})
    print("\n".join(str(message.content) for message in result["messages"]))


if __name__ == "__main__":
    main()
