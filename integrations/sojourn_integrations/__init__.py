"""A file or folder per agent framework; each imports the SDK and, lazily, its framework."""
