"""Admission (``admission`` in presets): may a program without KV be admitted now?

Protocol ``AdmissionPolicy``; policies ``everyone``, ``whole-program``, ``room-to-grow``, ``forecast-fits``.
"""
