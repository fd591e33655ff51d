"""InternVL 3."""
