"""Methods, which choose scales and codes: one per file."""

from .absmax import AbsMax as AbsMax
from .base import AbstractMethod as AbstractMethod, AbstractScaleMethod as AbstractScaleMethod
from .choose import choose_by_blocks as choose_by_blocks
from .gptq import GPTQ as GPTQ
from .grid import decode_rows as decode_rows, encode_rows as encode_rows, EncodedRows as EncodedRows
from .hqq import HQQ as HQQ
from .joint import JointMSE as JointMSE
from .learned import LearnedRounding as LearnedRounding
from .mse import MSE as MSE
