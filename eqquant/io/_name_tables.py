"""Tables of the names of arrays in checkpoints: name in the file, path in the model.

There is one for each family of models.
"""

from ._rules import Target


LLAMA = {
    "embed_tokens.weight": "embedding.weight",
    "layers.{n}.self_attn.{x:q|k|v}_proj.{p}": "layers.{n}.attention.{x}.{p}",
    "layers.{n}.self_attn.o_proj.{p}": "layers.{n}.attention.output.{p}",
    "layers.{n}.self_attn.{x:q|k}_norm.weight": "layers.{n}.attention.{x}_norm.weight",
    "layers.{n}.mlp.{x}_proj.{p}": "layers.{n}.mlp.{x}.{p}",
    "layers.{n}.input_layernorm.weight": "layers.{n}.attention_norm.weight",
    "layers.{n}.post_attention_layernorm.weight": "layers.{n}.mlp_norm.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "*.rotary_emb.inv_freq": None,
}
GEMMA = {
    "layers.{n}.post_attention_layernorm.weight": "layers.{n}.attention_post_norm.weight",
    "layers.{n}.pre_feedforward_layernorm.weight": "layers.{n}.mlp_norm.weight",
    "layers.{n}.post_feedforward_layernorm.weight": "layers.{n}.mlp_post_norm.weight",
}
QKV = tuple(f"layers.{{n}}.attention.{x}.{{p}}" for x in "qkv")
GATE_UP = ("layers.{n}.mlp.gate.{p}", "layers.{n}.mlp.up.{p}")
PHI3 = {"layers.{n}.self_attn.qkv_proj.{p}": QKV, "layers.{n}.mlp.gate_up_proj.{p}": GATE_UP}
MIXTRAL = {
    "layers.{n}.block_sparse_moe.gate.weight": "layers.{n}.router.weight",
    "layers.{n}.block_sparse_moe.experts.{e}.w1.weight": "layers.{n}.experts.gate.weight",
    "layers.{n}.block_sparse_moe.experts.{e}.w2.weight": "layers.{n}.experts.down.weight",
    "layers.{n}.block_sparse_moe.experts.{e}.w3.weight": "layers.{n}.experts.up.weight",
}
QWEN_MOE = {
    "layers.{n}.mlp.gate.weight": "layers.{n}.router.weight",
    "layers.{n}.mlp.experts.{e}.{x}_proj.weight": "layers.{n}.experts.{x}.weight",
    "layers.{n}.mlp.shared_expert.{x}_proj.weight": "layers.{n}.shared.{x}.weight",
    "layers.{n}.mlp.shared_expert_gate.weight": "layers.{n}.shared_gate.weight",
}
GPT2 = {
    "wte.weight": "embedding.weight",
    "wpe.weight": "position.weight",
    "h.{n}.ln_1.{p}": "layers.{n}.attention_norm.{p}",
    "h.{n}.attn.c_attn.{p}": Target(QKV, transpose=True),
    "h.{n}.attn.c_proj.{p}": Target("layers.{n}.attention.output.{p}", transpose=True),
    "h.{n}.ln_2.{p}": "layers.{n}.mlp_norm.{p}",
    "h.{n}.mlp.c_fc.{p}": Target("layers.{n}.mlp.up.{p}", transpose=True),
    "h.{n}.mlp.c_proj.{p}": Target("layers.{n}.mlp.down.{p}", transpose=True),
    "ln_f.{p}": "norm.{p}",
    "lm_head.weight": "head.weight",
    "*.attn.bias": None,
    "*.attn.masked_bias": None,
}
ENCODER = {  # BERT, which calls these `attention.self`, and ViT, `attention.attention`
    "encoder.layer.{n}.attention.*.query.{p}": "layers.{n}.attention.q.{p}",
    "encoder.layer.{n}.attention.*.key.{p}": "layers.{n}.attention.k.{p}",
    "encoder.layer.{n}.attention.*.value.{p}": "layers.{n}.attention.v.{p}",
    "encoder.layer.{n}.attention.output.dense.{p}": "layers.{n}.attention.output.{p}",
    "encoder.layer.{n}.intermediate.dense.{p}": "layers.{n}.mlp.up.{p}",
    "encoder.layer.{n}.output.dense.{p}": "layers.{n}.mlp.down.{p}",
    "pooler.dense.{p}": "pooler.{p}",
    "classifier.{p}": "head.{p}",
}
BERT = {
    "embeddings.{x}_embeddings.weight": "embeddings.{x}.weight",
    "embeddings.LayerNorm.{p}": "embeddings.norm.{p}",
    "encoder.layer.{n}.attention.output.LayerNorm.{p}": "layers.{n}.attention_norm.{p}",
    "encoder.layer.{n}.output.LayerNorm.{p}": "layers.{n}.mlp_norm.{p}",
    "*position_ids": None,
}
VIT = {
    "embeddings.cls_token": "cls",
    "embeddings.position_embeddings": "position",
    "embeddings.patch_embeddings.projection.{p}": "patch.{p}",
    "encoder.layer.{n}.layernorm_before.{p}": "layers.{n}.attention_norm.{p}",
    "encoder.layer.{n}.layernorm_after.{p}": "layers.{n}.mlp_norm.{p}",
    "layernorm.{p}": "norm.{p}",
}
GGUF = {
    "token_embd.weight": "embedding.weight",
    "token_embd_norm.{p}": "embeddings.norm.{p}",
    "position_embd.weight": "position.weight",
    "blk.{n}.attn_norm.{p}": "layers.{n}.attention_norm.{p}",
    "blk.{n}.attn_q.{p}": "layers.{n}.attention.q.{p}",
    "blk.{n}.attn_k.{p}": "layers.{n}.attention.k.{p}",
    "blk.{n}.attn_v.{p}": "layers.{n}.attention.v.{p}",
    "blk.{n}.attn_qkv.{p}": QKV,
    "blk.{n}.attn_output.{p}": "layers.{n}.attention.output.{p}",
    "blk.{n}.attn_{x:q|k}_norm.weight": "layers.{n}.attention.{x}_norm.weight",
    "blk.{n}.ffn_norm.{p}": "layers.{n}.mlp_norm.{p}",
    "blk.{n}.ffn_{x:gate|up|down}.{p}": "layers.{n}.mlp.{x}.{p}",
    "blk.{n}.ffn_gate_inp.weight": "layers.{n}.router.weight",
    "blk.{n}.ffn_{x:gate|up|down}_exps.weight": "layers.{n}.experts.{x}.weight",
    "blk.{n}.ffn_{x:gate|up|down}_shexp.weight": "layers.{n}.shared.{x}.weight",
    "blk.{n}.ffn_gate_inp_shexp.weight": Target("layers.{n}.shared_gate.weight", apply=lambda x: x.reshape(1, -1)),
    "blk.{n}.post_attention_norm.weight": "layers.{n}.attention_post_norm.weight",
    "blk.{n}.post_ffw_norm.weight": "layers.{n}.mlp_post_norm.weight",
    "output_norm.{p}": "norm.{p}",
    "output.weight": "head.weight",
    "rope_freqs.weight": None,
    "rope_factors_*.weight": None,
}
# Further arrays of architectures of GGUF.
GGUF_OWN = {
    "phi3": {"blk.{n}.ffn_up.{p}": GATE_UP},
    "bert": {
        "token_embd.weight": "embeddings.word.weight",
        "token_types.weight": "embeddings.token_type.weight",
        "position_embd.weight": "embeddings.position.weight",
        "blk.{n}.attn_output_norm.{p}": "layers.{n}.attention_norm.{p}",
        "blk.{n}.layer_output_norm.{p}": "layers.{n}.mlp_norm.{p}",
    },
}
