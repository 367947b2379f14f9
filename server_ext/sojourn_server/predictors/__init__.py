"""Learned prediction of output lengths from hidden states (Tetris §2.2).

Imports ``policies`` and torch. Start at ``background_trainer``, which runs ``length_trainer`` in a thread.
"""
