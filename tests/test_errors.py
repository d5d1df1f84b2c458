"""Bad input: each gives an error that states the rule, the value and the remedy.

Some mistakes are against the annotations, so the type checker that these tests run under refuses them first. Users have
no such checker: those are tested in an interpreter of their own, without one.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqquant as eqq
from eqquant._array.checks import check_quantizable
from eqquant._errors import NAMES_ELSEWHERE
from eqquant._formats.names import as_format

from .helpers import FORMATS, weights
from .test_architecture import PUBLIC


@pytest.fixture
def w(getkey):
    return weights(getkey(), (8, 64))


# One array


def test_a_scalar(w):
    with pytest.raises(ValueError, match="`x` must have at least one dimension. Got a scalar"):
        eqq.quantize(jnp.ones(()))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64, jnp.uint8])
def test_not_floating_point(dtype):
    with pytest.raises(TypeError, match=f"`x` must be a floating point array. Got dtype {jnp.dtype(dtype).name}"):
        check_quantizable(jnp.ones((2, 2), dtype), -1)


@pytest.mark.parametrize("axis", [2, -3, (0, 0), (0, -2), (), (-1, 5)])
def test_axis(w, axis):
    with pytest.raises(ValueError, match="`axis` must name different axes of `x`, from -2 to 1 for shape") as e:
        eqq.quantize(w, axis=axis)
    assert f"Got `axis={axis}`" in str(e.value)
    with pytest.raises(ValueError, match="`axis` must name different axes of layer.w, from -2 to 1"):
        eqq.quantize_tree({"layer": {"w": w}}, axis=axis)


def test_unknown_name(w):
    with pytest.raises(ValueError, match="`format` must be one of .*nf4.*Got 'int7'") as e:
        eqq.quantize(w, "int7")
    for row in FORMATS.values():
        assert f"{type(row.format).__name__.lower()}" in str(e.value)
    for call in (eqq.quantize_tree, eqq.plan_tree):
        with pytest.raises(ValueError, match="Got 'int7'"):
            call([w], "int7")
        with pytest.raises(ValueError, match="Got 'int7'"):
            call([w], {"*": "int7"})
        with pytest.raises(ValueError, match="^0: .*Got 'int7'"):
            call([w], lambda path, x: "int7")


def test_a_name_that_needs_arguments(w):
    with pytest.raises(ValueError, match=r"'codebook' has no defaults.*Construct it: `Codebook\(...\)`"):
        eqq.quantize(w, "codebook")


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_not_finite(w, value, dtype):
    bad = w.at[3, 5].set(value).astype(dtype)
    with pytest.raises(ValueError, match="`x` must be finite in float32.*nan_to_num"):
        eqq.quantize(bad)
    with pytest.raises(ValueError, match="layers.1 must be finite in float32"):
        eqq.quantize_tree({"layers": [w, bad]})


@pytest.mark.parametrize("rows", [2, 1025])
def test_not_finite_under_debug_nans(rows):
    """NumPy reads arrays of up to 65,536 values, and a compiled program reads larger ones."""
    bad = jnp.ones((rows, 64)).at[1, 2].set(jnp.inf)
    with jax.debug_nans(True), pytest.raises(ValueError, match="a must be finite in float32"):
        eqq.quantize_tree({"a": bad}, "int4")


@pytest.mark.parametrize("rows", [2, 1026])
def test_a_constant_inside_shard_map(rows):
    mesh, w = jax.make_mesh((2,), ("data",)), jnp.ones((rows, 64))
    f = jax.shard_map(lambda x: x @ eqq.quantize(w, "int4").mT, mesh=mesh, in_specs=P(), out_specs=P())
    assert jnp.array_equal(jax.jit(f)(w), w @ eqq.quantize(w, "int4").mT)


def test_too_large_for_float32():
    with jax.enable_x64(True), pytest.raises(ValueError, match="must be finite in float32"):
        eqq.quantize(np.full((2, 8), 1e300))


@pytest.mark.parametrize("size", [0, -64, True])
@pytest.mark.parametrize(
    "cls",
    [eqq.NF4, eqq.Int8, eqq.Int4, eqq.Int2, eqq.Ternary, eqq.Binary, lambda block_size: eqq.FP8("e4m3", block_size)],
)
def test_block_size(cls, size):
    with pytest.raises(ValueError, match='`block_size` of .* must be None, "tensor" or a positive multiple of') as e:
        cls(block_size=size)
    assert f"Got `block_size={size}`" in str(e.value)


@pytest.mark.parametrize(
    "cls, size, unit",
    [
        (eqq.NF4, 63, 2),
        (eqq.Int4, 1, 2),
        (eqq.Int6, 6, 4),
        (eqq.Int3, 4, 8),
        (eqq.Binary, 4, 8),
        (eqq.Ternary, 2, 4),
    ],
)
def test_block_size_that_splits_a_byte(cls, size, unit):
    with pytest.raises(ValueError, match=f"multiple of {unit}, so that blocks .*Got `block_size={size}`"):
        cls(block_size=size)


def test_block_size_of_a_codebook():
    with pytest.raises(ValueError, match="`block_size` of Codebook"):
        eqq.Codebook([-1, 0, 1], block_size=5)


@pytest.mark.parametrize(
    "values", [[1.0], [], [1, 1, 2], [0, np.nan], [0, np.inf], list(range(257)), np.zeros((2, 3)), [0.1, 0.1 + 1e-12]]
)
def test_codebook(values):
    with pytest.raises(ValueError, match=f"`values` must be 2 to 256 different finite numbers. Got {len(values)} of"):
        eqq.Codebook(values)


def test_quantized_arrays_have_no_hash(w):
    with pytest.raises(TypeError, match="unhashable"):
        hash(eqq.quantize(w))


def test_transpose(w):
    with pytest.raises(ValueError, match="`axes` must be a permutation of the 2 axes. Got"):
        eqq.quantize(w).transpose(0, 0)


# Trees


@pytest.mark.parametrize("call", [eqq.quantize_tree, eqq.plan_tree])
class TestTree:
    def test_pattern_that_matches_nothing(self, call, w):
        with pytest.raises(
            ValueError, match="Each pattern of `format` must match a leaf. Got 'layer.*', which matches none of: a.w"
        ):
            call({"a": {"w": w}}, {"*": "nf4", "layer.*": "int8"})

    @pytest.mark.parametrize(
        "select, message",
        [
            (lambda t: t["ids"], "Got ids: not floating point"),
            (lambda t: [t["w"], t["ids"]], "Got ids: not floating point"),
            (lambda t: t["scalar"], "Got scalar: a scalar"),
            (lambda t: t["q"], "Got q: already quantized, to NF4"),
            (lambda t: t["text"], "Got text: not an array"),
        ],
    )
    def test_where_selects_what_cannot_be_quantized(self, call, w, select, message):
        tree = {"w": w, "ids": jnp.arange(4), "scalar": jnp.ones(()), "q": eqq.quantize(w), "text": "relu"}
        with pytest.raises(TypeError, match=f"`where` must select floating point arrays. {message}"):
            call(tree, where=select)

    @pytest.mark.parametrize("where", [lambda t: t["nothing"], lambda t: 3, lambda t: t["w"].shape])
    def test_where_selects_nothing_of_the_tree(self, call, w, where):
        with pytest.raises(ValueError, match="`where` must return leaves or nodes of the tree"):
            call({"w": w}, where=where)

    @pytest.mark.parametrize(
        "tree, reason",
        [
            ({"ids": np.arange(4)}, "ids: not floating point"),
            ({"mask": np.ones((2, 2), bool)}, "mask: not floating point"),
            ({"c": np.ones((2, 2), np.complex64)}, "c: not floating point"),
            ({"scalar": np.ones((), np.float32)}, "scalar: a scalar"),
            ([np.ones(3, np.float32)], "0: fewer than two dimensions"),
        ],
    )
    def test_nothing_to_quantize(self, call, tree, reason):
        with pytest.raises(ValueError, match="The tree must hold something to quantize. Got none among") as e:
            call(tree)
        assert reason in str(e.value).partition("`plan_tree`")[2]  # the remedy comes first

    def test_empty_tree(self, call):
        with pytest.raises(ValueError, match="The tree must hold something to quantize. Got an empty tree. Pass a"):
            call({})

    @pytest.mark.parametrize(
        "pattern, meant",
        [
            ("layers[0].weight", "'layers.0.weight'"),
            ("['layers'][0]['weight']", "'layers.0.weight'"),
            ("layers[0].*", "'layers.0.*'"),
            ("layer.0.weight", "'layers.0.weight'"),
            ("layer.*", "'layers.*'"),
            ("Layers.*.wieght", "'layers.*.weight'"),
            ("weight", "'*weight*'"),
            ("*.layers.0.*", "'layers.0.*'"),
        ],
    )
    def test_pattern_that_is_nearly_right(self, call, w, pattern, meant):
        with pytest.raises(ValueError, match="Each pattern of `format` must match") as e:
            call({"layers": [{"weight": w}, {"weight": jnp.ones(w.shape)}]}, {pattern: "int8"})
        assert f"Did you mean {meant}?" in str(e.value)

    def test_a_pattern_after_a_wider_one_warns(self, call, w):
        tree = {"a": {"w": w, "b": jnp.ones(3)}, "b": {"w": w}}
        for rules, said in [
            ({"*": "nf4", "a.*": None}, r"`format` should .* take none: 'a\.\*' behind '\*'\. Put the narrower first"),
            ({"*.w": "nf4", re.compile("^a"): None}, r"'\^a' behind '\*\.w'"),  # the bias is no weight
            ({"*.w": "nf4", "a.*": None, "b.w": None}, r"'a\.\*' behind '\*\.w', 'b\.w' behind '\*\.w'\."),
            ({"?.w": "nf4", "[ab].w": None, "a.w": None}, r"none: 'a\.w' behind '\?\.w'"),  # as wide is not wider
        ]:
            with pytest.warns(UserWarning, match=said):
                call(tree, rules)
        call(tree, {"a.*": "nf4", "b.*": None, "*": "int8"})  # the rest, if any
        call(tree, {"*": "nf4", "a.b": None})  # takes nothing in any order
        call(tree, {"*": "nf4", "b.w": None}, where=lambda tree: tree["a"])

    def test_arguments_in_another_order(self, call, w):
        with pytest.raises(ValueError, match="Pass the tree first, then the format"):
            call("int4", lambda path, x: None)  # as a model is callable

    def test_pattern_that_is_near_to_nothing(self, call, w):
        with pytest.raises(
            ValueError, match="Each pattern of `format` must match.* Paths begin with: embedding, layers"
        ):
            call({"embedding": w, "layers": [{"weight": w}]}, {"head.*": None, "*": "int8"})

    @pytest.mark.parametrize(
        "keyword, remedy",
        [
            ("skip", "To leave leaves in float, write rules"),
            ("bits", "write `eqq.Int4()`"),
            ("formt", "Did you mean 'format'?"),
            ("act_format", "It is called `activations`."),
            ("config", "Pass it as the format: an `eqq.QuantConfig`, or rules"),
            ("filter_fn", "Pass a function as the format: `lambda path, leaf:"),
            ("calibration_data", "`method=eqq.GPTQ(stats)`"),
            ("load_in_4bit", "write 'nf4' or 'int8'"),
            ("quant_type", "It is called `format`."),
            ("double_quant", "write `eqq.NF4(double_quant=True)`"),
        ],
    )
    def test_unknown_keyword(self, call, w, keyword, remedy):
        with pytest.raises(TypeError, match=f"`{call.__name__}` has no argument `{keyword}`.") as e:
            call([w], **{keyword: 4})
        assert remedy in str(e.value)

    def test_rules_that_quantize_nothing(self, call, w):
        with pytest.raises(ValueError, match="Got none among.*rule '\\*'"):
            call([w], {"*": None})
        with pytest.raises(ValueError, match="the format function returned None"):
            call([w], lambda path, x: None)

    def test_already_quantized(self, call, w):
        for tree in ({"w": eqq.quantize(w), "b": jnp.ones(3)}, eqq.quantize(w)):
            with pytest.raises(ValueError, match="Got one that is already quantized.*`dequantize_tree` first"):
                call(tree)


def test_the_axis_of_every_leaf_is_checked_before_any_is_quantized(w):
    tree = {"a": w[None], "b": w}
    with pytest.raises(ValueError, match="different axes of b, from -2 to 1"):
        eqq.quantize_tree(tree, axis=-3)


# Products


def test_matmul(w):
    q = eqq.quantize(w)
    for product in (lambda: q @ jnp.ones(8), lambda: jnp.ones(64) @ q, lambda: q @ jnp.ones((3, 2))):
        with pytest.raises(ValueError, match="`matmul` contracts axes of equal length. Got lengths"):
            product()
    with pytest.raises(ValueError, match="`implementation` must be one of .*xla, or None. Got 'magic'"):
        jax.block_until_ready(eqq.matmul(q, jnp.ones(64), implementation="magic"))
    with pytest.raises(TypeError, match="`explain_matmul` needs a quantized operand"):
        eqq.explain_matmul(w, w)


# Without a type checker

SNIPPETS = {
    "int": ("eqq.quantize(jnp.arange(8))", "TypeError: `x` must be a floating point array. Got dtype int32"),
    "complex": ("eqq.quantize(jnp.ones(8, complex))", "TypeError: `x` must be a floating point array. Got dtype comp"),
    "bool": ("eqq.quantize(jnp.ones(8, bool))", "TypeError: `x` must be a floating point array. Got dtype bool"),
    "again": ("eqq.quantize(eqq.quantize(w))", "TypeError: `x` is already quantized, to NF4"),
    "class": ("eqq.quantize(w, eqq.NF4)", "TypeError: `format` must be an instance. Got the class NF4. Write `NF4()`"),
    "dtype of scales": (
        "eqq.Int4(scale_dtype='e8m0')",
        "ValueError: `scale_dtype` of Int4 must be one of float32, float",
    ),
    "width": ("eqq.formats.MLX(7)", "ValueError: `bits` of MLX must be 2, 3, 4, 5, 6 or 8. Got 7"),
    "class in a tree": ("eqq.quantize_tree([w], eqq.NF4)", "TypeError: `format` must be an instance."),
    "class in rules": ("eqq.quantize_tree([w], {'*': eqq.NF4})", "TypeError: `format` must be an instance."),
    "class of a function": (
        "eqq.quantize_tree([w], lambda path, x: eqq.NF4)",
        "TypeError: 0: `format` must be an instance.",
    ),
    "number": ("eqq.quantize(w, 4)", "TypeError: `format` must be a format or the name of one. Got 4."),
    "float block": ("eqq.NF4(64.0)", "ValueError: `block_size` of NF4 must be None"),
    "text block": ("eqq.Int8('row')", "ValueError: `block_size` of Int8 must be None"),
    "no report": ("eqq.analysis.plan_bits([w], None)", "TypeError: `sensitivities` must be what `eqq.analysis.sensit"),
    "skip": ("eqq.quantize_tree([w], skip=['0'])", "TypeError: `quantize_tree` has no argument `skip`. To leave"),
    "rule of a number": ("eqq.plan_tree([w], {0: 'int8'})", "TypeError: The keys of `format` must be globs"),
    "fp8": ("eqq.FP8('e3m4')", "ValueError: `kind` must be one of e4m3, e5m2"),
    "dtype of codes": (
        "eqq.quantize_tree([w], dtype='int8')",
        "TypeError: `dtype` must be floating point. Got int8. It is the dtype that codes dequantize to.",
    ),
    "dtype of a format": ("eqq.quantize(w, dtype='nf4')", "TypeError: `dtype` must be floating point. Got 'nf4'."),
    "requantize to a format": (
        "eqq.requantize(eqq.quantize(w), 'int8')",
        "TypeError: `x` must be new values for `q`. Got the format 'int8'. To change the format, write "
        "`eqq.quantize(q.dequantize(), 'int8')`.",
    ),
    "method of a transform": (
        "eqq.quantize_tree([w], 'int4', method=eqq.transforms.AWQ)",
        "TypeError: `method` must be a method, such as `eqq.MSE()`. Got AWQ. That changes the float model: write "
        "`model = eqq.transforms.smooth(model, eqq.transforms.AWQ(stats))` first.",
    ),
    "method of a transform with statistics": (
        "eqq.quantize_tree([w], 'int4', method=eqq.transforms.SmoothQuant({}))",
        "TypeError: `method` must be a method, such as `eqq.MSE()`. Got a SmoothQuant. That changes the float model",
    ),
    "method of a function": (
        "eqq.quantize_tree([w], 'int4', method=eqq.transforms.rotate)",
        "TypeError: `method` must be a method, such as `eqq.MSE()`. Got rotate. That changes the float model: write "
        "`model = eqq.transforms.rotate(model)` first.",
    ),
    "method of a format": (
        "eqq.quantize_tree([w], method=eqq.Int4())",
        "TypeError: `method` must be a method, such as `eqq.MSE()`. Got the format Int4(). Pass it as `format`.",
    ),
    "method of statistics": (
        "eqq.quantize(w, method={'w': 1})",
        "TypeError: `method` must be a method, such as `eqq.MSE()`. Got a dict. Statistics go into a method",
    ),
    "smooth by a class": (
        "eqq.transforms.smooth([w], eqq.transforms.AWQ)",
        "TypeError: `method` must be an `eqq.transforms.AWQ` or an `eqq.transforms.SmoothQuant`, with statistics. Got "
        "AWQ. Write `stats = ",
    ),
    "mxfp8": ("eqq.MXFP8('e3m4')", "ValueError: `kind` must be e4m3 or e5m2. Got 'e3m4'"),
    "fp8 block": ("eqq.FP8(block_size=0)", "ValueError: `block_size` of FP8 must be None"),
}


@pytest.fixture(scope="module")
def outcomes():
    program = f"""
import json
import jax.numpy as jnp
import eqquant as eqq
w = jnp.ones((8, 64))
out = {{}}
for name, snippet in json.loads({json.dumps({name: code for name, (code, _) in SNIPPETS.items()})!r}).items():
    try:
        out[name] = repr(eval(snippet))
    except Exception as e:
        out[name] = f"{{type(e).__name__}}: {{e}}"
print(json.dumps(out))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SNIPPETS)
def test_without_a_type_checker(outcomes, name):
    assert outcomes[name].startswith(SNIPPETS[name][1]), outcomes[name]


# Names of other libraries


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("AWQ", "It is `eqq.transforms.AWQ`."),
        ("SmoothQuant", "It is `eqq.transforms.SmoothQuant`."),
        ("collect_stats", "It is `eqq.calibrate.collect_stats`."),
        ("Q4_K", "It is `eqq.formats.Q4_K`."),
        ("LoraArray", "It is `eqq.arrays.LoraArray`."),
        *NAMES_ELSEWHERE.items(),
    ],
)
def test_names_of_other_libraries(name, remedy):
    with pytest.raises(AttributeError) as e:
        getattr(eqq, name)
    assert str(e.value) == f"module 'eqquant' has no attribute {name!r}. {remedy}"
    ours = re.findall(r"eqq\.([\w.]*\w)", remedy)
    assert ours and name not in PUBLIC and set(ours) <= set(PUBLIC)


@pytest.mark.parametrize("name", ["nf5", "_Calibrator", "__wrapped__", "Stats"])
def test_names_of_nothing(name):
    with pytest.raises(AttributeError, match=f"^module 'eqquant' has no attribute '{name}'$"):
        getattr(eqq, name)


@pytest.mark.long
def test_python_adds_no_guess_to_a_remedy():
    done = subprocess.run([sys.executable, "-c", "import eqquant as e; e.AWQ"], capture_output=True, text=True)
    assert done.stderr.rstrip().endswith("It is `eqq.transforms.AWQ`.")


def test_the_original_survives_every_error(w):
    tree = {"a": w, "b": w.at[0, 0].set(jnp.nan)}
    before = jtu.tree_leaves(tree)
    for bad in ({"format": "int7"}, {"axis": 7}, {"where": lambda t: t["c"]}, {}):
        with pytest.raises((ValueError, TypeError)):
            eqq.quantize_tree(tree, **bad)
    assert all(a is b for a, b in zip(jtu.tree_leaves(tree), before, strict=True))


def test_formats_pass_through(w):
    assert as_format(eqq.NF4(32)) == eqq.NF4(32)
    assert as_format("NF4") == eqq.NF4() and as_format("q4_0") == eqq.formats.Q4_0()


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("fp4", "'mxfp4' or 'nvfp4'"),
        ("int7", "'int8', or 'int6'"),
        ("gptq", "names a method, not a format"),
        ("int8_dynamic", "write 'int8', and pass `activations='int8'` to `quantize_tree`"),
        ("w4a8", "write 'int4', and pass `activations='int8'`"),
        ("int4_weight_only", "Weight-only quantization is the default: write 'int4'."),
        ("w8a16", "write 'int8'."),
        ("4-bit", "write 'nf4' or 'int4'"),
        ("q4_k_m", "write 'q4_k'"),
        ("itn8", "Did you mean 'int8'?"),
        ("trellis_2", "Did you mean 'trellis2'?"),
        ("q4-0", "Did you mean 'q4_0'?"),
    ],
)
def test_unknown_format_names(name, remedy):
    with pytest.raises(ValueError, match=f"`format` must be one of .*Got '{name}'") as e:
        as_format(name)
    assert remedy in str(e.value)
