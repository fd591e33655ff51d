"""Anole: a Chameleon that draws."""
