"""The keys and values of attention, quantized as they come, and attention to them."""

from .cache import QuantizedCache as QuantizedCache
