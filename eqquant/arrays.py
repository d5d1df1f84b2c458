"""Classes of arrays that functions put around weights, for `isinstance` and annotations."""

from ._wrappers.activation import ActivationQuantizedArray as ActivationQuantizedArray
from ._wrappers.lora import LoraArray as LoraArray
from ._wrappers.simulated import FakeQuantizedArray as FakeQuantizedArray
