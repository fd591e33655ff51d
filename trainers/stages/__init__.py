"""One runner per stage kind."""
