"""Whole models: selects leaves, quantizes and shards them, and reports on them."""
