"""Arrays around another array: input transforms, quantized activations, fake quantization, low-rank factors."""

# Importing this registers a rule of Quax.
from . import convolution as convolution
