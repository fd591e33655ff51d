"""What a recipe says: its files, its schema, its plan, what is checked before it runs, and its run."""
