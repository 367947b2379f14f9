"""Serves many replicas behind one address. ``routing`` makes decisions; this package adds HTTP and Ray.

``http`` is the HTTP server, on one machine or as a Ray Serve replica. ``ray`` is a cluster of engines and
gateways with it. Start with ``http.gateway_app``.
"""
