"""Numbers without formats and quantized arrays: packing, small floats, blocks, rounding."""
