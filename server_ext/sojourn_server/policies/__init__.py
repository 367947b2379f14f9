"""Policies of engines, gateways and prefill/decode fleets, and the presets that name them.

One folder per question, with its protocol and policies. A policy is pure: a frozen view and ``now`` in, a
decision out. Imports ``programs`` only. Start at ``policy_protocols`` and ``preset``.
"""
