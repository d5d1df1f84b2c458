"""Calibration: ranges, scales and statistics from data. See `docs/calibrate.md`."""

from .calibrator import AbstractCalibrator as AbstractCalibrator
from .clipping import Entropy as Entropy, MSE as MSE
from .granularity import Granularity as Granularity
from .one_call import (
    calibrate_min_max as calibrate_min_max,
    calibrate_per_channel as calibrate_per_channel,
    calibrate_per_group as calibrate_per_group,
    calibrate_per_tensor as calibrate_per_tensor,
    calibrate_percentile as calibrate_percentile,
)
from .percentile import Percentile as Percentile
from .ranges import MinMax as MinMax, MovingAverage as MovingAverage
from .result import (
    CalibrationResult as CalibrationResult,
    dequantize_with_params as dequantize_with_params,
    quantize_with_params as quantize_with_params,
)
