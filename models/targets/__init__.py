"""Adapters: one interface over the frozen models whose output must not change."""
