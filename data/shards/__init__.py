"""Arrays of many samples in files of their own: shards, their checks, and picture codes."""
