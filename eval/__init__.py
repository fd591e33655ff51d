"""The decoding loop, its rules and policies, and what is measured on it."""
