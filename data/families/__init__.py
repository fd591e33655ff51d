"""How each family of targets reads pictures: one file a family, and one table of them."""
