"""Reproduces the figures of reference systems: weights that any language can generate, integers of any width, theory.

The rest of the library does not use it. `eqquant.analysis` exports its names too.
"""

from ..._formats.any_width import integer_format as integer_format
from .comparison import compare_bit_widths as compare_bit_widths, compare_granularities as compare_granularities
from .generators import (
    channel_weights as channel_weights,
    gaussian_weights as gaussian_weights,
    lcg_channels as lcg_channels,
    lcg_gaussian as lcg_gaussian,
    lcg_outliers as lcg_outliers,
    lcg_student as lcg_student,
    lcg_uniform as lcg_uniform,
    outlier_weights as outlier_weights,
    student_weights as student_weights,
    uniform_weights as uniform_weights,
)
from .perturb import (
    bit_width_degradation as bit_width_degradation,
    BitWidthDegradation as BitWidthDegradation,
    outlier_impact as outlier_impact,
    OutlierImpact as OutlierImpact,
    scale_sensitivity as scale_sensitivity,
    ScaleSensitivity as ScaleSensitivity,
    WidthRow as WidthRow,
)
from .suite import run_suite as run_suite
from .theory import (
    accuracy_retention as accuracy_retention,
    error_within_bounds as error_within_bounds,
    theoretical_max_error as theoretical_max_error,
    theoretical_sqnr as theoretical_sqnr,
)
