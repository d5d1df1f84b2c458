"""Layers of families of models between which a factor for each channel can move, for `eqq.smooth`."""

from .._tree.folds import Folds, Into


def llama_pairs(head_size: int, *, offset: float | int = 0, layers: str = "layers.{n}") -> Folds:
    """Returns the pairs of Llama and its relatives, by the paths of [`eqquant.io.names.llama`][], for
    [`eqquant.smooth`][]: norms, which feed projections; values, which feed the output of attention; and `up`, which
    feeds `down` after a product with the gate.

    !!! Example

        ```python
        model = eqq.smooth(model, eqq.AWQ(stats), fold=eqq.io.names.llama_pairs(head_size=128))
        ```

    **Arguments:**

    - `head_size`: the channels of a head of attention. Several heads of queries may share one of values.
    - `offset`: what norms add to their weights before they multiply by them: 1 for Gemma.
    - `layers`: the path of a layer: `"layers"` for one stack of them.

    **Returns:**

    A mapping for `fold`.
    """
    return {
        f"{layers}.attention_norm.{{p}}": Into((f"{layers}.attention.{{x:q|k|v}}.weight",), offset=offset),
        f"{layers}.mlp_norm.{{p}}": Into((f"{layers}.mlp.{{x:gate|up}}.weight",), offset=offset),
        f"{layers}.attention.v.{{p}}": Into((f"{layers}.attention.output.weight",), head_size),
        f"{layers}.mlp.up.{{p}}": f"{layers}.mlp.down.weight",
    }


def bert_pairs(*, layers: str = "layers.{n}") -> Folds:
    """Returns the pairs of BERT, by the paths of [`eqquant.io.names.bert`][], for [`eqquant.smooth`][].

    There is one: values, which feed the output of attention. A norm of BERT feeds a residual sum too, and GELU stands
    between `up` and `down`.

    **Arguments:**

    - `layers`: the path of a layer: `"layers"` for one stack of them.

    **Returns:**

    A mapping for `fold`.
    """
    return {f"{layers}.attention.{{v:v|value}}.{{p}}": f"{layers}.attention.output.weight"}
