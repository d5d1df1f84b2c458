"""Writes the layouts of other libraries: one file each, as in `_dialects/`.

Each is the inverse of the reader of its name.

A writer has `NAME`, `FITS` (which formats it holds, in words) and `layout(name, q)`: the tensors of one quantized
array. Bits are written as they are, so that reading the file gives the same values. A writer of safetensors also has
`settings`, which makes the part of `config.json` that its library reads.
"""
