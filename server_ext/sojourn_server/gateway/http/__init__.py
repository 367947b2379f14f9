"""The gateway as HTTP: requests in, what the core decided out. No vLLM and no Ray in here."""
