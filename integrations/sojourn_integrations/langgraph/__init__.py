"""LangGraph 1.x: reports the graph, its threads and its breakpoints.

Programs, nodes and tool calls come from LangChain's callbacks, which LangGraph calls too:
``langchain/callback_handler.py`` receives the callbacks, and ``langchain/run_tree.py`` decides a node's name.
This package adds what callbacks do not carry: ``graph_runs`` the runs, ``graph_reader`` the graph. ``patch``
wraps ``stream``, ``astream``, ``batch`` and ``abatch`` of all graphs, since every other way to run a graph
calls one of these methods. ``wrap(graph)`` wraps the same methods of one graph.

Interrupts: a run that stops at an ``interrupt()`` or a breakpoint keeps its program open. The wait is a tool
call of class ``human`` without heartbeats (``langchain.run_tree``), and the next run of the same
thread continues the program. A run that reaches its end ends the program. A later run of the thread has the
same program id again.

``langchain.thread_program_ids`` derives the program id of a thread. Without a checkpointer a thread id has no
meaning, as in LangGraph.

``docs/frameworks/langgraph.md`` lists the limits.
"""

from __future__ import annotations

from .graph_reader import graph_of
from .graph_runs import patch, unpatch, wrap

__all__ = ["graph_of", "patch", "unpatch", "wrap"]
