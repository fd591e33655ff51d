"""What starts, places and ends a run: its stages in order, their folders and results, locks, stops and restarts."""
