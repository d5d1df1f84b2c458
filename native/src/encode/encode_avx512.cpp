// Quantizing, compiled with the flags of one instruction set.
#include "encode/encode_kernels.h"

extern const EncodeKernel kEncodeAvx512 = {encode_rows, reduce_rows};
