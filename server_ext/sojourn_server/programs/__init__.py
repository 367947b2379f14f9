"""State of agent programs: status, table, histories, tool-call parsers. No clock, no I/O.

This package imports only the SDK. Start reading at ``program_table.py``.
"""
