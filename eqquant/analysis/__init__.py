"""Measures quantization: the error of arrays and models, sensitivities, and plans that mix formats.

See `docs/analysis.md`. Sums run on the host, in float64. `reference/` holds the functions that reproduce the figures of
reference systems.
"""

from .._report import Report as Report
from ._benchmark import Benchmark as Benchmark, Comparison as Comparison, run_benchmark as run_benchmark
from ._comparison import compare_formats as compare_formats
from ._divergence import DivergenceReport as DivergenceReport, output_divergence as output_divergence
from ._error import analyze_error as analyze_error, ErrorReport as ErrorReport, quantization_mse as quantization_mse
from ._layers import (
    analyze_tree as analyze_tree,
    compare_trees as compare_trees,
    LeafError as LeafError,
    TreeErrorReport as TreeErrorReport,
)
from ._plan import BitPlan as BitPlan, plan_bits as plan_bits, PlannedLeaf as PlannedLeaf
from ._sensitivity import (
    LeafSensitivity as LeafSensitivity,
    sensitivity as sensitivity,
    SensitivityReport as SensitivityReport,
    weight_sensitivity as weight_sensitivity,
)
from .reference import (
    accuracy_retention as accuracy_retention,
    bit_width_degradation as bit_width_degradation,
    BitWidthDegradation as BitWidthDegradation,
    channel_weights as channel_weights,
    compare_bit_widths as compare_bit_widths,
    compare_granularities as compare_granularities,
    error_within_bounds as error_within_bounds,
    gaussian_weights as gaussian_weights,
    integer_format as integer_format,
    lcg_channels as lcg_channels,
    lcg_gaussian as lcg_gaussian,
    lcg_outliers as lcg_outliers,
    lcg_student as lcg_student,
    lcg_uniform as lcg_uniform,
    outlier_impact as outlier_impact,
    outlier_weights as outlier_weights,
    OutlierImpact as OutlierImpact,
    run_suite as run_suite,
    scale_sensitivity as scale_sensitivity,
    ScaleSensitivity as ScaleSensitivity,
    student_weights as student_weights,
    theoretical_max_error as theoretical_max_error,
    theoretical_sqnr as theoretical_sqnr,
    uniform_weights as uniform_weights,
    WidthRow as WidthRow,
)
