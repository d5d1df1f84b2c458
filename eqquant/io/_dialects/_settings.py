"""The settings of quantization in `config.json`, and which of them are known."""

from collections.abc import Mapping

from .._files import Files


# Settings that cannot change decoded values unseen: a reader uses them, tensors repeat them, or they are about
# calibration, kernels or placement. In the order: of several libraries and MLX; GPTQ and AWQ; AutoRound;
# compressed-tensors; bitsandbytes; fp8 and ModelOpt; Quark and others.
KNOWN = frozenset(
    """
    quant_method version format bits group_size sym zero_point desc_act lm_head ignore ignored_layers exclude_modules
    modules_to_not_convert quantized_layers packed_modules_mapping backend dataset batch_size tokenizer provider meta
    method damp_percent true_sequential kv_cache_scheme activation_scheme run_compressed dequantize quantization_status
    mode
    checkpoint_format is_marlin_format dynamic pack_dtype static_groups damp_auto_increment act_group_aware mse gptaq
    gptaq_alpha hyb_act model_seqlen max_input_length use_exllama disable_exllama exllama_config use_cuda_fp16
    model_name_or_path model_file_base_name cache_block_outputs pad_token_id block_name_to_quantize
    module_name_preceding_first_block modules_in_block_to_quantize w_bit q_group_size do_fuse modules_to_fuse
    fuse_max_seq_len
    packing_format extra_config autoround_version data_type iters lr minmax_lr nsamples seqlen amp scale_dtype
    low_gpu_mem_usage gradient_accumulate_steps enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning
    enable_alg_ext model_free quant_block_list to_quant_block_names regex_config quant_lm_head act_bits act_sym
    act_data_type act_dynamic act_group_size static_kv_dtype super_bits super_group_size layer_config
    config_groups global_compression_ratio num_bits type symmetric strategy block_structure actorder observer
    observer_kwargs zp_dtype
    load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage
    bnb_4bit_quant_type bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
    llm_int8_skip_modules llm_int8_threshold
    weight_block_size fmt scale_fmt activation_scale_ub expert_dtype weight_per_tensor quant_algo producer
    kv_cache_quant_algo weights input_activations
    export exclude global_quant_config layer_quant_config layer_type_quant_config kv_cache_quant_config quant_mode
    softmax_quant_spec log_severity_level quant_type quant_type_kwargs include_input_output_embeddings
    untie_embedding_weights
    """.split()
)


def find_settings(files: Files, *keys: str) -> Mapping[str, object]:
    """Returns the settings of quantization in `config.json`, under the first of these keys."""
    text = files.config.get("text_config")  # of a model for text and images
    for config in (files.config, text if isinstance(text, dict) else {}):
        for key in keys or ("quantization_config", "compression_config", "quantization"):
            if isinstance(found := config.get(key), dict):
                return found
    return {}


def find_layer_settings(settings: Mapping[str, object], layers: object, name: str) -> Mapping[str, object]:
    """Returns the settings of the layer of a weight: its own among `layers`, or common ones."""
    own = layers.get(name.removesuffix(".weight")) if isinstance(layers, Mapping) else None
    return {**settings, **own} if isinstance(own, dict) else settings


def weights_of_groups(settings: Mapping[str, object]) -> list[dict[str, object]]:
    """Returns what the groups of compressed-tensors say about weights."""
    groups = settings.get("config_groups")
    found = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    return [w for w in found if isinstance(w, dict)]


def find_unknown(settings: Mapping[str, object]) -> str | None:
    """Returns a setting that may change values and that no reader knows, or `None`."""
    sparsity = settings.get("sparsity_config")
    known = KNOWN | {"sparsity_config"} if isinstance(sparsity, dict) and sparsity.get("format") == "dense" else KNOWN
    given = [*settings.items(), *(item for weights in weights_of_groups(settings) for item in weights.items())]
    return next((key for key, value in given if value and key not in known), None)
