"""``sojourn demo``: the same eight coding agents on a stock engine and on ours, and what each took.

The agents are mini-swe-agent's own, with real bash in real repositories; the tokens the model emits
are forced, so that both arms do exactly the same work and only the engine's handling of KV differs.
"""
