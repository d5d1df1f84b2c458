"""The layouts of other libraries: one file each.

A dialect is a module with two functions. `recognizes(files)` says whether a checkpoint is of this dialect, from its
configuration, metadata and names. `items(files)` groups companion tensors under the name of the weight, and says how
to read each weight: it takes out every part that it uses, and `read_items` refuses a weight with others. To add one:
one file, the names of its parts in `PARTS`, one row in `DIALECTS`, and a file of tests with arrays that the library
itself wrote and dequantized.
"""
