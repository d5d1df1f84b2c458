"""Quax: the trace of `eqquant.quaxify`, and the rules that keep arrays packed in it."""

# Importing these registers the rules.
from . import (
    control_flow as control_flow,
    convolution as convolution,
    lookup as lookup,
    movement as movement,
    multiply as multiply,
    products as products,
    ragged as ragged,
)
