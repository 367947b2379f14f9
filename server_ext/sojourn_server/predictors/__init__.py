"""Learned prediction of output lengths from hidden states (Tetris §2.2).

This package imports the SDK, safetensors and torch. Start reading at ``background_trainer``, which runs
``length_trainer`` in a thread.
"""
