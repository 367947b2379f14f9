"""Queue order (``order`` in presets): which waiting request is next?

Protocol ``QueueOrderPolicy``; policies ``request-fcfs``, ``program-fcfs``, ``programs-in-line``,
``least-attained``.
"""
