"""Names of the arrays of model families in checkpoints, and pairs of layers.

See `docs/files.md`.
"""

from ._names import (
    bert as bert,
    gemma as gemma,
    gguf as gguf,
    gpt2 as gpt2,
    llama as llama,
    mixtral as mixtral,
    of as of,
    phi3 as phi3,
    qwen_moe as qwen_moe,
    rename as rename,
    rotary_halves as rotary_halves,
    vit as vit,
)
from ._pairs import bert_pairs as bert_pairs, llama_pairs as llama_pairs, llama_rotations as llama_rotations
