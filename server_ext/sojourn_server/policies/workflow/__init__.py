"""Workflow prediction (``workflow_prediction`` in presets): what does a program do next?

Protocol ``WorkflowPredictionPolicy``; policies ``none``, ``three-tiers``.
"""
