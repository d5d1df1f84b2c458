"""Training: gradients, float masters, low-rank factors, quantized optimizer state."""

from .._wrappers.lora import LoraArray as LoraArray
from .distill import distill as distill, distill_blocks as distill_blocks
from .gradients import filter_grad as filter_grad, filter_value_and_grad as filter_value_and_grad
from .lora import loraify as loraify, merge_lora as merge_lora
from .masters import apply_updates as apply_updates, float_masters as float_masters
from .moments import quantize_state as quantize_state
