"""Starting vLLM with our parts in place: which versions, which flags, which process.

Nothing here imports vLLM or torch; the engine lives in a process of its own.
"""
