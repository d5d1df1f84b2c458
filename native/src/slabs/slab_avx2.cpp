// What slabs need besides products, compiled with the flags of one instruction set.
#include "slabs/slab_kernels.h"

extern const SlabKernel kSlabAvx2 = {join_rows,   zeros_of_rows, scales_of_rows,
                                     sums_of_row, add_products,  add_products_transposed};
