"""Runners of the visual autoregressive track: one per stage kind."""
