"""Qwen3.5, most of whose layers recur."""
