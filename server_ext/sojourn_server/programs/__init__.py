"""State of agent programs: status, table, histories, tool-call parsers. Pure.

Imports the SDK only. Start with ``program_table.py``.
"""
