"""Retention: how long is a finished turn's KV kept?

Protocol ``RetentionPolicy``; policies ``none``, ``fixed``, ``until-the-end``, ``continuum``, ``least-waste``,
``tool-type``.
"""
