"""Measures quantization: errors of arrays and models, sensitivities, and bit plans.

See `docs/mixed_precision.md`. Sums run on the host, in float64.
"""

from ._comparison import compare_formats as compare_formats
from ._divergence import output_divergence as output_divergence
from ._error import analyze_error as analyze_error
from ._layers import analyze_tree as analyze_tree, compare_trees as compare_trees
from ._plan import plan_bits as plan_bits
from ._sensitivity import sensitivity as sensitivity, weight_sensitivity as weight_sensitivity
