"""How codes are found: one method per file."""

from .absmax import AbsMax as AbsMax
from .base import (
    AbstractMethod as AbstractMethod,
    AbstractScaleMethod as AbstractScaleMethod,
    encode_rows as encode_rows,
    Encoded as Encoded,
)
from .hqq import HQQ as HQQ
from .mse import MSE as MSE
