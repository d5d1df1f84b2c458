"""Load the weights of all-MiniLM-L6-v2 into an Equinox model by rules, quantize it, and save it for the next time.

The same call loads a checkpoint that another library quantized: then the weights stay packed as they are.
"""

# %% Imports
import argparse
import tempfile
from pathlib import Path

import equinox as eqx
import jax.random as jr
import minilm

import eqquant as eqq


parser = argparse.ArgumentParser()
parser.add_argument("--smoke", action="store_true", help="nothing: this is fast enough")
parser.parse_args()
folder = Path(tempfile.mkdtemp())

# %% What is in the checkpoint
checkpoint = eqq.io.open(minilm.weights_directory() / "model.safetensors")
print(checkpoint)

# %% Which array becomes which leaf: `minilm.NAMES` are ten rules. A plan reads no array.
skeleton = eqx.filter_eval_shape(minilm.Encoder, jr.key(0))
print(eqq.io.plan_load(skeleton, checkpoint, minilm.NAMES))

# %% A rule that is missing is an error, with all that does not fit, before anything is read
try:
    incomplete = {name: path for name, path in minilm.NAMES.items() if "LayerNorm" not in name}
    eqq.io.load_into(skeleton, checkpoint, incomplete)
except ValueError as e:
    print("An error, as it should be:", str(e)[:300])

# %% Load, quantize, save
model = eqq.io.load_into(skeleton, checkpoint, minilm.NAMES)
quantized = eqq.quantize_tree(model, {"embeddings.*": "int8", "*": "nf4"})
eqq.save(folder / "minilm.safetensors", quantized)
size = (folder / "minilm.safetensors").stat().st_size
print(f"From {checkpoint.nbytes:,} bytes to {size:,}.")

# %% The next time: three lines
loaded = eqq.load(folder / "minilm.safetensors", skeleton)
assert eqx.tree_equal(loaded, quantized)
ids, mask = minilm.tokenize(["A man is eating food.", "Someone is having a meal.", "The sky is blue."], 16)
a, b, c = minilm.embed(loaded, ids, mask)
print(f"Alike: {a @ b:.2f}. Not alike: {a @ c:.2f}.")
assert a @ b > 0.5 > a @ c
