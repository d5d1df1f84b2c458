from .bitwise import Binary as Binary, Ternary as Ternary
from .codebook import AbstractCodebook as AbstractCodebook, Codebook as Codebook, Dynamic8 as Dynamic8, NF4 as NF4
from .floating import FP8 as FP8
from .gguf import (
    IQ4_NL as IQ4_NL,
    IQ4_XS as IQ4_XS,
    Q1_0 as Q1_0,
    Q2_0 as Q2_0,
    Q2_K as Q2_K,
    Q3_K as Q3_K,
    Q4_0 as Q4_0,
    Q4_1 as Q4_1,
    Q4_K as Q4_K,
    Q5_0 as Q5_0,
    Q5_1 as Q5_1,
    Q5_K as Q5_K,
    Q6_K as Q6_K,
    Q8_0 as Q8_0,
    TQ2_0 as TQ2_0,
)
from .integer import Int2 as Int2, Int3 as Int3, Int4 as Int4, Int5 as Int5, Int6 as Int6, Int8 as Int8
from .iq import (
    IQ1_M as IQ1_M,
    IQ1_S as IQ1_S,
    IQ2_S as IQ2_S,
    IQ2_XS as IQ2_XS,
    IQ2_XXS as IQ2_XXS,
    IQ3_S as IQ3_S,
    IQ3_XXS as IQ3_XXS,
)
from .microscaling import MXFP4 as MXFP4, MXFP8 as MXFP8, NVFP4 as NVFP4
from .mlx import MLX as MLX
from .trellis import Trellis as Trellis
