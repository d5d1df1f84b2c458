"""The quantized matmul: its rules, its implementations, and the choice among them."""

# Importing these registers the rules of the primitives and of Quax.
from . import (
    checkpoint_rules as checkpoint_rules,
    control_flow_rules as control_flow_rules,
    primitive_rules as primitive_rules,
    quax_rules as quax_rules,
    rounded_rules as rounded_rules,
)
