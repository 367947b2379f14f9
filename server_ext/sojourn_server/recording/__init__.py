"""Recordings of a scheduler's events and actions, so that a replay can be compared with the original.

A scheduler's decisions depend only on its events and their times. ``RecordingScheduler.handle`` also writes
each event with the resulting actions and decisions; queries change nothing, so they are not recorded.
``simulator.parity_replay`` handles the events in a second scheduler, built from the header, and compares.

Format: lines of JSON, gzipped. The first line is the header (``RecordingHeader``). Each other is one event:

    [now, [kind, field, …], [[[kind, field, …], …], [decision, …]]]

    now        seconds on the engine's clock
    event      the name of the event's class, then its fields in order; at the end the reason of the end
    outcome    actions and new entries of the decision log, or the name of the exception; at the end totals

Without an end, the engine was killed or the file was cut. Floats keep all digits. There are ids, agent types,
tenants, graph nodes, names and command heads of tools, token counts, and the first digits of block hashes
(only those that the program's last ones do not have), but no text, arguments or results.
"""
