"""Mistral 3 and Pixtral."""
