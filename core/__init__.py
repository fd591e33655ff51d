"""Ground floor: errors, the config base, shared nouns, ranks, tracking. Imports nothing of ours."""
