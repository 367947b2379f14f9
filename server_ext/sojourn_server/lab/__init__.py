"""The lab: the engine's own scheduler in virtual time; only the forward pass is made up."""
