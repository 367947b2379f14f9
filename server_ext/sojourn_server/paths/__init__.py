"""How KV comes and goes beside an engine: links, buffers, and transfers between engines and their store.

``core`` and what it is made of are plain Python: time comes in as ``now``, memory is given, and what is to be
done goes out as actions. ``manager`` does it, in a thread of its own. No torch, no vLLM.
"""
