"""State of agent programs: status, table, histories, tool-call parsers. No clock, no I/O.

Imports the SDK only. Start with ``program_table.py``.
"""
