"""Ground floor: errors, the config base, shared types, ranks, tracking. Imports nothing of ours."""
