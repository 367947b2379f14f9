"""Many replicas behind one address: thin shells around ``routing``.

``http`` is the server itself, on one machine or as a replica on Ray; ``ray`` is a cluster of engines and
gateways with one coordinator. Start with ``http.gateway_app``.
"""
