"""What no policy can beat: offline eviction, free copies, a cache without end."""
