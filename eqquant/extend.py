"""Base classes and helpers for formats, methods and calibrators of your own."""

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
from .calibrate._calibrator import AbstractCalibrator as AbstractCalibrator
