"""Policies of a cluster by name, and the clients of engines behind the gateway's routing core."""
