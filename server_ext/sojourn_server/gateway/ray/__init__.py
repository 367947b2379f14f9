"""Engines and gateways on Ray Serve, which starts, places, restarts and scales them.

Nothing here coordinates. Engines and gateways announce their addresses to ``FleetDirectory``, and gateways
read the list. From there on a gateway works as it does without Ray (``gateway.http``): it asks the engines
about themselves, decides alone, and passes the requests of another gateway's program on to that gateway
(``gateway.http.peers``).

Only this package imports Ray. Start with ``deployments``, which has what runs on Ray; ``ray_application``
starts and stops it."""
