"""Policies of engines, gateways and prefill/decode fleets, and the presets that name them.

Each folder of policies answers one or more questions. Each question has a protocol, and policies that
implement this protocol. ``costs`` computes inputs of the policies. ``presets`` and ``cluster_presets`` have
the preset files. A policy computes a decision from a frozen view and ``now``, without side effects. This
package imports only the SDK and ``programs``. Start reading at ``policy_protocols`` and ``preset``.
"""
