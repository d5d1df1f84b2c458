"""Quantization for Equinox, and for every JAX pytree.

One call, `eqq.quantize_tree(model, "nf4")`, turns the weights of a float model into quantized arrays. It stays the
same model: it runs under every JAX transformation, trains, saves and shards, and is smaller and faster.

- Arrays: `quantize`, `dequantize`, `QuantizedArray`, and formats such as `NF4`, `Int8` and `MXFP4`.
- Models: `quantize_tree`, `plan_tree`, `summary`, `dequantize_tree`.
- Products: `q @ x`, `matmul`, `explain_matmul`, `quaxify`.
- Training: `filter_value_and_grad`, `float_masters`, `apply_updates`, `loraify`, `quantize_state`.
- Files: `save`, `load`, `eqquant.io`.
- Better accuracy: `GPTQ` and other methods, `eqquant.transforms`, `eqquant.calibrate`.
- Measuring: `eqquant.analysis`.
- More: `eqquant.formats` (GGUF, MLX), `eqquant.arrays`, and `eqquant.extend` for formats and methods of your own.
"""

import typing as _typing
from importlib.metadata import version as _version

from . import (
    analysis as analysis,
    arrays as arrays,
    calibrate as calibrate,
    extend as extend,
    formats as formats,
    io as io,
    transforms as transforms,
)
from ._array.array import (
    ArrayOrQuantized as ArrayOrQuantized,
    is_quantized as is_quantized,
    QuantizedArray as QuantizedArray,
)
from ._array.contraction import matmul as matmul
from ._array.quantize import dequantize as dequantize, quantize as quantize, requantize as requantize, unpack as unpack
from ._array.serialize import (
    deserialise_filter_spec as deserialise_filter_spec,
    serialise_filter_spec as serialise_filter_spec,
)
from ._cache import QuantizedCache as QuantizedCache
from ._errors import suggest_name as _suggest_name
from ._formats import (
    Binary as Binary,
    Codebook as Codebook,
    Dynamic8 as Dynamic8,
    FP8 as FP8,
    Int2 as Int2,
    Int3 as Int3,
    Int4 as Int4,
    Int5 as Int5,
    Int6 as Int6,
    Int8 as Int8,
    MXFP4 as MXFP4,
    MXFP8 as MXFP8,
    NF4 as NF4,
    NVFP4 as NVFP4,
    Ternary as Ternary,
)
from ._matmul.explain import explain_matmul as explain_matmul
from ._matmul.selected import take_layer as take_layer
from ._methods import (
    AbsMax as AbsMax,
    GPTQ as GPTQ,
    HQQ as HQQ,
    JointMSE as JointMSE,
    LearnedRounding as LearnedRounding,
    MSE as MSE,
)
from ._quax.quaxify import quaxify as quaxify
from ._training import (
    apply_updates as apply_updates,
    distill as distill,
    distill_blocks as distill_blocks,
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    float_masters as float_masters,
    loraify as loraify,
    merge_lora as merge_lora,
    quantize_state as quantize_state,
)
from ._training.delayed import delayed_scaling as delayed_scaling
from ._training.low_precision import low_precision_training as low_precision_training
from ._training.mask import train_only as train_only, trainable_mask as trainable_mask
from ._training.residuals import checkpoint_quantized as checkpoint_quantized
from ._training.simulate import finalize as finalize
from ._tree.config import QuantConfig as QuantConfig
from ._tree.explain import explain as explain
from ._tree.no_dense import no_dense as no_dense
from ._tree.placement import tree_shardings as tree_shardings
from ._tree.quantize import (
    plan_tree as plan_tree,
    quantize_activations as quantize_activations,
    quantize_tree as quantize_tree,
)
from ._tree.summary import (
    dequantize_tree as dequantize_tree,
    summary as summary,
    tree_nbytes as tree_nbytes,
)
from ._wrappers.simulated import fake_quantize as fake_quantize
from .calibrate._sequential import quantize_sequentially as quantize_sequentially
from .io._load import load as load
from .io._save import save as save


__version__ = _version("eqquant")
# The names above, which stand there as `x as x`: a type checker reads those.
__all__ = [name for name in dir() if not name.startswith("_")]  # pyright: ignore[reportUnsupportedDunderAll]

if not _typing.TYPE_CHECKING:  # a type checker would take every name

    def __getattr__(name: str) -> object:
        """Raises for an unknown name, and suggests ours."""
        remedy = _suggest_name(name, (analysis, arrays, calibrate, extend, formats, io, transforms))
        if not remedy:
            raise AttributeError(f"module 'eqquant' has no attribute {name!r}")
        # With `obj`, Python would add a guess of its own.
        raise AttributeError(f"module 'eqquant' has no attribute {name!r}. {remedy}", name=name, obj=None)
