"""Measures quantization: errors of arrays and models, sensitivities, and bit plans.

See `docs/mixed_precision.md`. Sums run on the host, in float64.
"""

from .._report import Report as Report
from .._training.residuals import residual_nbytes as residual_nbytes
from ._comparison import (
    Benchmark as Benchmark,
    compare_formats as compare_formats,
    Comparison as Comparison,
    run_benchmark as run_benchmark,
)
from ._divergence import DivergenceReport as DivergenceReport, output_divergence as output_divergence
from ._error import analyze_error as analyze_error, ErrorReport as ErrorReport, quantization_mse as quantization_mse
from ._layers import (
    analyze_tree as analyze_tree,
    compare_trees as compare_trees,
    LeafError as LeafError,
    TreeErrorReport as TreeErrorReport,
)
from ._outliers import outlier_impact as outlier_impact, OutlierImpact as OutlierImpact
from ._plan import BitPlan as BitPlan, plan_bits as plan_bits, PlannedLeaf as PlannedLeaf
from ._sensitivity import (
    LeafSensitivity as LeafSensitivity,
    sensitivity as sensitivity,
    SensitivityReport as SensitivityReport,
    weight_sensitivity as weight_sensitivity,
)
