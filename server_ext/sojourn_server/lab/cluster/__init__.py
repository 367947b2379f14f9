"""Several engines behind one gateway or router, in one virtual time."""
