"""Ways of computing the quantized matmul. Raw arrays in, raw arrays out: nothing here knows a format."""
