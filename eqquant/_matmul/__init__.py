"""The quantized matmul: its rules, its implementations, and the choice among them."""

# Importing these registers the rules of the primitives.
from . import primitive_rules as primitive_rules, rounded as rounded
