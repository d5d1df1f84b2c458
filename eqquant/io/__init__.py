"""Files: our own, and the checkpoints of other libraries. See `docs/files.md`."""

from ._load import assign as assign
