"""Remaining and forecast: how many tokens are still to come, and when do blocks run out?

Protocols ``RemainingTokensPolicy`` (``none``, ``mean``, ``survival``, ``hidden-states``) and
``ShortageForecastPolicy`` (``none``, ``expected-need``); ``kv_demand`` has the arithmetic.
"""
