"""Stages of heads that read a language model's states: caching those states, and training on them."""
