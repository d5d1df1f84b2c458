"""Changes of a float model that make it lose less when it is quantized."""

from ._folds import FoldInto as FoldInto, ResidualStream as ResidualStream
from ._pairs import llama_pairs as llama_pairs, llama_rotations as llama_rotations
from ._rotate import rotate as rotate
from ._smooth import AWQ as AWQ, smooth as smooth, SmoothQuant as SmoothQuant
