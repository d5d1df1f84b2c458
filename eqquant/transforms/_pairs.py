"""Pairs of layers to fold into, and rotations, for families of models.

They are the `fold` of `eqq.transforms.smooth` and `eqq.transforms.rotate`.
"""

from ._folds import FoldInto, Folds, ResidualStream, Rotations


def llama_pairs(head_size: int, *, offset: float | int = 0, layers: str = "layers.{n}") -> Folds:
    """Returns the pairs of Llama and its relatives, by the paths of `io.names.llama`.

    For [`eqquant.transforms.smooth`][]: norms, which feed projections; values, which feed the output of attention; and
    `up`, which feeds `down` after a product with the gate.

    !!! Example

        ```python
        model = eqq.transforms.smooth(model, eqq.transforms.AWQ(stats), fold=eqq.transforms.llama_pairs(head_size=128))
        ```

    **Arguments:**

    - `head_size`: the channels of a head of attention. Several heads of queries may share one of values.
    - `offset`: a number that norms add to their weights before multiplying: 1 for Gemma.
    - `layers`: the path of a layer: `"layers"` for one stack of them.

    **Returns:**

    A mapping for `fold`.
    """
    return {
        f"{layers}.attention_norm.{{p}}": FoldInto((f"{layers}.attention.{{x:q|k|v}}.weight",), offset=offset),
        f"{layers}.mlp_norm.{{p}}": FoldInto((f"{layers}.mlp.{{x:gate|up}}.weight",), offset=offset),
        f"{layers}.attention.v.{{p}}": FoldInto((f"{layers}.attention.output.weight",), head_size),
        f"{layers}.mlp.up.{{p}}": f"{layers}.mlp.down.weight",
    }


def llama_rotations(head_size: int, *, offset: float | int = 0, layers: str = "layers.{n}") -> Rotations:
    """Returns the rotations of Llama and its relatives that cost nothing at run time.

    By the paths of [`eqquant.io.names.llama`][], for [`eqquant.transforms.rotate`][]: the residual stream, and the
    heads of values with the outputs of attention. Only `down` remains, which takes a product of two layers and rotates
    online.

    A model that multiplies by its embedding to get logits needs a head of its own, because the last norm's gains move
    into it. Norms between a layer and the residual sum, as in Gemma 2, do not let a rotation through.

    !!! Example

        ```python
        model = eqq.transforms.rotate(model, fold=eqq.transforms.llama_rotations(head_size=128), batches=batches)
        ```

    **Arguments:**

    - `head_size`, `offset`, `layers`: as for [`eqquant.transforms.llama_pairs`][].

    **Returns:**

    A mapping for `fold`.
    """
    writers = ("embedding.weight", f"{layers}.attention.output.{{p}}", f"{layers}.{{m:mlp|experts}}.down.{{p}}")
    normalized = "|".join((*(f"{m}.{x}.weight" for m in ("mlp", "experts") for x in ("gate", "up")), "router.weight"))
    readers = {
        f"{layers}.attention_norm.weight": f"{layers}.attention.{{x:q|k|v}}.weight",
        f"{layers}.mlp_norm.weight": f"{layers}.{{x:{normalized}}}",
        "norm.weight": "head.weight",
    }
    pair = {f"{layers}.attention.v.{{p}}": FoldInto((f"{layers}.attention.output.weight",), head_size)}
    return {writers: ResidualStream(readers, offset), **pair}
