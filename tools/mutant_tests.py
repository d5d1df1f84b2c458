"""The tests that concern a file of the package: `mutate_python.py` runs them on its mutants."""

NUMERICS = """test_numerics.py test_packing.py test_formats.py test_errors.py
    -k 'test_numerics or test_packing or minifloat or e8m0 or mx_scale or nvfp4_scale or codebook or ties or round_half
    or int2 or affine or equals or codes_of or integers or mlx or block_size or format_names or pass_through'"""
TRELLIS = "test_trellis.py -k 'by_hand or best_sequence or minimizes or outlier or names or scales'"
PALLAS_TPU = """test_pallas_tpu.py -m 'slow or not slow'
    -k 'unsupported or bits or halves or tiles or config or highest or transposed or 300 and (nf4 or affine)'"""
# By the first pattern that the path of a file contains. Files that share tests run together.
TESTS = {
    "_numerics/hadamard": "test_rotations.py -k 'transpose or matrices'",
    "_numerics/hashing": "test_low_precision.py -k 'hashes or seed'",
    "_numerics/trellis": TRELLIS,
    "_numerics": NUMERICS,
    "_formats/trellis": TRELLIS,
    "_formats/iq": "test_vectors.py -k 'not (native or mesh or products or masters)'",
    "_formats/grids": "test_vectors.py -k 'gguf or nearest or bytes or any_size'",
    "_formats": NUMERICS,
    "kernels/pallas_tpu": PALLAS_TPU,
    "kernels/vpu": PALLAS_TPU,
    "kernels/pallas_gpu": "test_pallas_gpu.py --every 10",
    "kernels/ptx": "test_pallas_gpu.py --every 10",
    "kernels/packed": "test_xla_cpu.py test_dispatch.py -k 'format or length or pref or forced or on_gpu' --every 6",
    "kernels/xla_cpu": "test_xla_cpu.py test_dispatch.py -k 'xla_cpu or pref'",
    "kernels/xla_codes": "test_activations.py test_dispatch.py -k 'test_activations or types'",
    "kernels/cpu_int8": "test_cpu_int8.py --every 20",
    "kernels/cpu": "test_cpu_matmul.py --every 30",
    "kernels/xla.": "test_dispatch.py test_pallas_tpu.py -k 'xla_on_gpu or test_float32'",
    "_matmul/dispatch": """test_dispatch.py test_activations.py test_select.py
        -k 'pref or forc or prec or types or refus or symbolic or small_floats or few_rows_mult or several_indices
        or empty_batch or stacked'""",
    "_matmul/explain": "test_matmul.py test_activations.py test_explain.py -k 'explain or last_two'",
    "_matmul/problem": "test_matmul.py test_activations.py test_dispatch.py -k 'explain or pref'",
    "_matmul/selected": "test_select.py -k 'not devices and not training'",
    "_matmul/rows": "test_activations.py -k 'no_scale or straight or lowest or nan_in or transformations'",
    "_matmul/primitive_rules": """test_matmul.py test_select.py test_experts.py test_dispatch.py
        test_partition.py -k 'test_matmul or test_select or ragged or export or one_tpu'""",
    "_matmul/partition": """test_partition.py
        -k 'tensor_par or scattered or fully or both_operands or cover_more or parts or stacked or more_devices'""",
    "_matmul/quaxify": "test_ecosystem.py test_operators.py -k quaxify",
    "_matmul/quax": "test_quax_packed.py test_operators.py -k 'test_operators or nf4 or codes'",
    "_matmul/rounded": "test_low_precision.py test_delayed.py",
    "_matmul/control_flow": "test_control_flow.py",
    "_matmul/checkpoint": "test_quax_packed.py test_control_flow.py -k 'custom or checkpoint or rules'",
    "_matmul": "test_dispatch.py -k 'pref or forc'",
    "_methods/gptq": "test_gptq.py --every 5",
    "_methods/gram": "test_statistics.py test_gptq.py test_learned.py --every 5",
    "_methods/learned": "test_learned.py --every 5",
    "_methods/joint": "test_joint.py --every 5",
    "_methods/fingerprint": "test_fingerprint.py --every 5",
    "_methods/statistics": "test_statistics.py test_gptq.py test_experts.py test_joint.py test_imatrix.py --every 5",
    "_methods/base": "test_statistics.py test_methods.py test_gptq.py test_fingerprint.py --every 5",
    "_methods/stochastic": "test_methods.py test_formats.py test_masters.py test_simulate.py -k stoch --every 5",
    "_methods/given": "test_statistics.py test_calibrate.py test_delayed.py -k 'scale or numpy or clipped' --every 5",
    "_methods": "test_statistics.py test_methods.py test_formats.py test_contract.py test_errors.py --every 5",
    "calibrate/_collect": "test_collect_stats.py test_experts.py --every 5",
    "calibrate/_gradients": "test_collect_stats.py -k 'grad or lookup or table' --every 5",
    "calibrate/_obs": "test_statistics.py test_collect_stats.py test_sequential.py test_experts.py --every 5",
    "calibrate/_dataflow": "test_sequential.py --every 5",
    "calibrate/_sequential": "test_statistics.py test_sequential.py --every 5",
    "calibrate/_stats": "test_statistics.py test_collect_stats.py test_activations_static.py test_experts.py --every 5",
    "calibrate": "test_calibrate.py --every 5",
    "_training/delayed": "test_delayed.py --every 5",
    "_training/distill": "test_distill.py --every 5",
    "_training/gradients": "test_gradients.py --every 5",
    "_training/lora": "test_lora.py --every 5",
    "_training/low_precision": "test_low_precision.py test_delayed.py --every 5",
    "_training/mask": "test_lora.py test_gradients.py test_delayed.py -k 'mask or train or low_rank' --every 5",
    "_training/masters": "test_masters.py test_masters_errors.py --every 5",
    "_training/moments": "test_moments.py --every 5",
    "_training/residuals": "test_residuals.py --every 5",
    "_training/simulate": "test_simulate.py --every 5",
    "analysis": "test_analysis.py test_analysis_models.py --every 5",
}
