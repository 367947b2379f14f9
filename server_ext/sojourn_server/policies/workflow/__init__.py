"""Foresight: what does a program do next?

Protocol ``WorkflowPredictionPolicy``; policies ``none``, ``three-tiers``.
"""
