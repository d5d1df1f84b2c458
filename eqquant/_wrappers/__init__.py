"""Array wrappers: input transforms, activation and fake quantization, low-rank factors."""
