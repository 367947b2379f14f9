"""Policies of engines, gateways and prefill/decode fleets, and the presets that name them.

Each folder answers one question, with a protocol and policies that implement this protocol. A policy computes
a decision from a frozen view and ``now``, without side effects. This package imports only the SDK and
``programs``. Start reading at ``policy_protocols`` and ``preset``.
"""
