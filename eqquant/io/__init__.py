"""Files: our own, and the checkpoints of other libraries. See `docs/files.md`."""

from ._checkpoint import Checkpoint as Checkpoint, CheckpointRow as CheckpointRow, open as open
from ._convert import convert as convert, skeleton as skeleton
from ._load import assign as assign
from ._write import write as write
