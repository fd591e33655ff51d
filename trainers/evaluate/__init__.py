"""What an `evaluate` stage is made of: benchmarks, methods, the loop that measures, and what else it looks into."""
