"""Numbers without arrays of ours and without formats: packing, small floats, blocks, rounding."""
