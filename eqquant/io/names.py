"""Names of the arrays of model families in checkpoints.

See `docs/files.md`.
"""

from ._names import (
    bert as bert,
    detect as detect,
    gemma as gemma,
    gguf as gguf,
    gpt2 as gpt2,
    llama as llama,
    mixtral as mixtral,
    phi3 as phi3,
    qwen_moe as qwen_moe,
    rename as rename,
    rotary_halves as rotary_halves,
    vit as vit,
)
