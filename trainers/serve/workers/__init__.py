"""Programs that run in an engine's own Python, where nothing of ours is installed: each imports only its neighbours."""
