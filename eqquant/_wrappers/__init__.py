"""Array wrappers: input transforms, activation and fake quantization, low-rank factors."""

# Importing these registers rules of Quax.
from . import (
    convolution as convolution,
    lookup_rules as lookup_rules,
    movement_rules as movement_rules,
    multiplied as multiplied,
    pointwise_rules as pointwise_rules,
    ragged_rules as ragged_rules,
)
