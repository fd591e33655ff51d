"""Benchmark suites: their sets, files in one layout, and published ones from the hub."""
