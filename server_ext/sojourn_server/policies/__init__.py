"""Policies of engines, gateways and prefill/decode fleets, and the presets that name them.

Each folder answers one question: it has a protocol, and the policies that implement it. A policy is pure: a
frozen view and ``now`` in, a decision out. Imports ``programs`` only. Start at ``policy_protocols`` and
``preset``.
"""
