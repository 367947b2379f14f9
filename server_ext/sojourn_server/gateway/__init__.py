"""Many replicas behind one address: where a request goes, and the way there."""
