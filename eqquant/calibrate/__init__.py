"""Calibration: ranges, scales and statistics from data. See `docs/ranges.md`."""

from ._clipping import MSERange as MSERange, Percentile as Percentile
from ._collect import collect_stats as collect_stats
from ._ranges import MinMax as MinMax, MovingAverage as MovingAverage
