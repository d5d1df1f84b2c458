"""The formats of GGUF files and of MLX, which names such as `"q4_k"` mean everywhere."""

from ._formats import (
    IQ4_NL as IQ4_NL,
    IQ4_XS as IQ4_XS,
    MLX as MLX,
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
