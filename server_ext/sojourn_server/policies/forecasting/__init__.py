"""Forecasts (``output_length`` and ``forecast`` in presets): how many tokens will a request still generate,
and when do blocks run out?

Protocols ``RemainingTokensPolicy`` (``none``, ``mean``, ``survival``, ``hidden-states``) and
``ShortageForecastPolicy`` (``none``, ``expected-need``); ``kv_demand`` has the arithmetic.
"""
