"""The gateway on a Ray cluster. Nothing outside of this folder imports Ray."""
