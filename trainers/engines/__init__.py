"""Serving engines that write a target's answers and hidden states, beside the ranks."""
