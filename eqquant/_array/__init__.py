"""The quantized array: its axes, its operators, quantizing, and the primitive that it multiplies by."""
