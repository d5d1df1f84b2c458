"""Ways of computing the quantized matmul. They know no formats: a weight is its arrays, and a table of its codes."""
