"""What an API server shows of the engine: routes and the Prometheus exposition. Never imports vLLM."""
