"""Calibration: ranges, scales and statistics from data. See `docs/calibrate.md`."""

from ._calibrator import AbstractCalibrator as AbstractCalibrator
from ._clipping import MSE as MSE
from ._percentile import Percentile as Percentile
from ._ranges import MinMax as MinMax, MovingAverage as MovingAverage
from ._result import CalibrationResult as CalibrationResult
from ._stats import ActivationStats as ActivationStats, collect_stats as collect_stats, LeafStats as LeafStats
from .reference import (
    calibrate_min_max as calibrate_min_max,
    calibrate_per_channel as calibrate_per_channel,
    calibrate_per_group as calibrate_per_group,
    calibrate_per_tensor as calibrate_per_tensor,
    calibrate_percentile as calibrate_percentile,
    dequantize_with_params as dequantize_with_params,
    quantize_with_params as quantize_with_params,
)
