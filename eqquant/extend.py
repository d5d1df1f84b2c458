"""Base classes and helpers for formats, methods, transforms and calibrators of your own."""

from ._formats.base import (
    AbstractAffineFormat as AbstractAffineFormat,
    AbstractFormat as AbstractFormat,
    AbstractOffsetFormat as AbstractOffsetFormat,
)
from ._methods import (
    AbstractMethod as AbstractMethod,
    AbstractScaleMethod as AbstractScaleMethod,
    choose_by_blocks as choose_by_blocks,
    decode_rows as decode_rows,
    encode_rows as encode_rows,
    EncodedRows as EncodedRows,
)
from ._tree.smooth import AbstractSmoothing as AbstractSmoothing
from ._wrappers.mapped import AbstractMappedArray as AbstractMappedArray
from ._wrappers.simulated import straight_through as straight_through
from .calibrate._calibrator import AbstractCalibrator as AbstractCalibrator
