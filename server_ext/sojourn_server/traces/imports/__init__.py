"""Imports of agent runs from other records: OpenTelemetry spans and sojourn's ledgers.

``import_formats`` lists the formats.
"""
