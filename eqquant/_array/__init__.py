"""The quantized array: its axes, operators and products, and how to make one."""
