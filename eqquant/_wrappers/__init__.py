"""Arrays around another array: input transforms, quantized activations, fake quantization, low-rank factors."""

# Importing these registers rules of Quax.
from . import (
    convolution as convolution,
    lookup_rules as lookup_rules,
    multiplied as multiplied,
    structure_rules as structure_rules,
)
