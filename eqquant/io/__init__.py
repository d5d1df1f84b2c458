"""Files: our own, and the checkpoints of other libraries. See `docs/files.md`."""

from . import names as names
from ._checkpoint import Checkpoint as Checkpoint, open as open
from ._convert import convert as convert
from ._imatrix import read_imatrix as read_imatrix
from ._load import assign as assign
from ._load_into import load_into as load_into, plan_load as plan_load
from ._rules import Target as Target
from ._write import write as write
