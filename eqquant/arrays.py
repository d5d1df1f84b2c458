"""Classes of arrays that functions make, for `isinstance` and annotations."""

from ._matmul.selected import SelectedArray as SelectedArray
from ._wrappers.activation import ActivationQuantizedArray as ActivationQuantizedArray
from ._wrappers.lora import LoraArray as LoraArray
from ._wrappers.low_precision import LowPrecisionArray as LowPrecisionArray
from ._wrappers.permuted import PermutedArray as PermutedArray
from ._wrappers.rotated import RotatedArray as RotatedArray
from ._wrappers.scaled import ScaledArray as ScaledArray
from ._wrappers.simulated import FakeQuantizedArray as FakeQuantizedArray
