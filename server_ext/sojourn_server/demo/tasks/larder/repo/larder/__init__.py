"""A cache with a time to live."""
