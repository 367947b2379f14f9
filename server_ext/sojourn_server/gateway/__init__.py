"""Serves many replicas behind one address. ``routing`` decides; this package adds HTTP and Ray.

``http`` is the server itself, on one machine or as a replica on Ray; ``ray`` is a cluster of engines and
gateways with one coordinator. Start with ``http.gateway_app``.
"""
