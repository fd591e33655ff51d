"""From a finished run to a repository that others can use: folder, card, a fresh process that tries it, and the Hub."""
