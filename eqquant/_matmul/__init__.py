"""Computes the quantized matmul: its rules, its implementations, and the choice among them."""

# Importing these registers the rules of the primitive and of Quax.
from . import quax_rules as quax_rules, rules as rules
