from .bitwise import Binary as Binary, Ternary as Ternary
from .codebook import AbstractCodebook as AbstractCodebook, Codebook as Codebook, Dynamic8 as Dynamic8, NF4 as NF4
from .floating import FP8 as FP8
from .gguf import Q4_0 as Q4_0, Q8_0 as Q8_0
from .integer import (
    AbstractInteger as AbstractInteger,
    Int2 as Int2,
    Int3 as Int3,
    Int4 as Int4,
    Int5 as Int5,
    Int6 as Int6,
    Int8 as Int8,
)
from .microscaling import MXFP4 as MXFP4, MXFP8 as MXFP8, NVFP4 as NVFP4
