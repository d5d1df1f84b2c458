// Quantizing: random values by random steps, against one value at a time. Included by `fuzz.cpp`.

struct MadeEncode {
  EncodeProblem problem;
  std::shared_ptr<void> keep;
  std::vector<int> expected;
  std::string text;
};

// In which larger integers are larger floats.
int32_t float_order(float value) {
  const int32_t bits = static_cast<int32_t>(float_to_bits(value));
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

int expected_code(const EncodeProblem& p, float value) {
  const float top = static_cast<float>((1 << p.bits) - 1);
  if (value != value) return p.nan;
  if (p.rule == kEven) return static_cast<int>(std::min(std::max(nearbyintf(value), -p.bias), top - p.bias) + p.bias);
  if (p.rule == kUp) return static_cast<int>(std::min(std::max(truncf(value + p.bias), 0.0f), top));
  int code = p.codes[0];
  for (int64_t i = 0; i < p.num_steps; ++i)
    if (float_order(value) >= p.steps[i]) code = p.codes[i + 1];
  return code;
}

MadeEncode make_encode(Random& random, const Cell* cell = nullptr) {
  MadeEncode made;
  EncodeProblem& p = made.problem;
  p = EncodeProblem{};
  p.bits = 1 + static_cast<int>(below(random, 8));
  p.n = 1 + below(random, 9);
  p.k = 1 + (coin(random) ? below(random, 150) : below(random, 2000));
  if (cell != nullptr) {
    p.bits = cell->bits;
    p.n = cell->n;
    p.k = cell->k;
  }
  const int64_t sizes[] = {8, 16, 32, 64, 256, 48, p.k, 1 + below(random, 99)};
  p.block_size = std::min(sizes[below(random, 8)], p.k);
  p.blocks = (p.k + p.block_size - 1) / p.block_size;
  for (int width = 8; width > 0; width /= 2)
    if (p.bits & width) p.words += (p.k * width + 7) / 8;
  p.x_type = static_cast<int>(below(random, 3));
  p.rule = static_cast<int>(below(random, 3));
  p.bias =
      static_cast<float>(p.rule == kEven ? (coin(random) ? 1 << (p.bits - 1) : 0) : below(random, 1 << p.bits) + 0.5);
  p.nan = static_cast<int>(below(random, 1 << p.bits));
  const int64_t count = p.rule == kSteps ? below(random, (1 << std::min(p.bits, 5)) + 1) : 0;
  struct Arrays {
    Exact<uint8_t> x, y;
    Exact<float> divisor, factor, offset, shift;
    Exact<int32_t> steps, codes;
  };
  const int64_t item = p.x_type == kFloat32 ? 4 : 2, blocks = p.n * p.blocks;
  auto arrays = std::make_shared<Arrays>(Arrays{
      Exact<uint8_t>(p.n * p.k * item), Exact<uint8_t>(p.n * p.words), Exact<float>(blocks), Exact<float>(blocks),
      Exact<float>(blocks), Exact<float>(blocks), Exact<int32_t>(count), Exact<int32_t>(count + 1)});
  Arrays& a = *arrays;
  made.keep = arrays;
  const bool factors = coin(random, 30), offsets = coin(random, 30), shifts = coin(random, 30);
  std::vector<float> x(p.n * p.k);
  for (size_t i = 0; i < x.size(); ++i) {
    float value = coin(random, 90) ? normal(random) * (1 << (p.bits - 1))
                : coin(random)     ? 0.5f * below(random, 9)
                : coin(random)     ? -0.0f
                                   : NAN;
    if (p.x_type != kFloat32) {
      if (value != value) value = 0;
      const uint16_t two = p.x_type == kFloat16 ? to_half(value) : to_bfloat16(value);
      memcpy(&a.x[2 * i], &two, 2);
      value = p.x_type == kFloat16 ? static_cast<float>(half(two)) : bits_to_float(static_cast<uint32_t>(two) << 16);
    } else {
      memcpy(&a.x[4 * i], &value, 4);
    }
    x[i] = value;
  }
  for (int64_t i = 0; i < blocks; ++i) {
    a.divisor[i] = coin(random, 5)         ? 0
                 : coin(random, 5)         ? NAN
                 : factors && coin(random) ? 1
                                           : 0.5f + fabsf(normal(random));
    a.factor[i] = a.divisor[i] == 1 ? normal(random) : 1;
    a.offset[i] = normal(random);
    a.shift[i] = static_cast<float>(below(random, 1 << p.bits));
  }
  std::vector<int32_t> steps(count);
  for (auto& step : steps) step = float_order(normal(random) * (1 << (p.bits - 1)));
  std::sort(steps.begin(), steps.end());
  for (int64_t i = 0; i < count; ++i) a.steps[i] = steps[i];
  for (int64_t i = 0; i <= count; ++i) a.codes[i] = static_cast<int32_t>(below(random, 1 << p.bits));
  p.x = a.x.data.get();
  p.y = a.y.data.get();
  p.divisor = a.divisor.data.get();
  p.factor = factors ? a.factor.data.get() : nullptr;
  p.offset = offsets ? a.offset.data.get() : nullptr;
  p.shift = shifts ? a.shift.data.get() : nullptr;
  p.steps = a.steps.data.get();
  p.codes = a.codes.data.get();
  p.num_steps = count;
  for (int64_t i = 0; i < p.n * p.k; ++i) {
    const int64_t block = i / p.k * p.blocks + i % p.k / p.block_size;
    volatile float value = x[i];  // each operation is rounded
    if (offsets) value = value - a.offset[block];
    if (a.divisor[block] == 0)
      value = 0;
    else if (factors && a.divisor[block] == 1)
      value = value * a.factor[block];
    else
      value = value / a.divisor[block];
    if (shifts) value = value + a.shift[block];
    made.expected.push_back(expected_code(p, value));
  }
  char text[200];
  snprintf(text, sizeof text, "encode n %ld k %ld bits %d block %ld x %d rule %d steps %ld", static_cast<long>(p.n),
           static_cast<long>(p.k), p.bits, static_cast<long>(p.block_size), p.x_type, p.rule, static_cast<long>(count));
  made.text = text;
  return made;
}

// Code `k` of a row by the definition of the packing, whose parts have the widths of the bits of `bits`, widest first.
int packed_code(const uint8_t* row, int64_t length, int bits, int64_t k) {
  if ((bits & (bits - 1)) == 0) return code_at(row, length, bits, k);
  const int64_t segment = 64 * (8 / (bits & -bits)), first = k / segment * segment;
  const int64_t count = std::min(segment, length - first);
  const uint8_t* part = row + first * bits / 8;
  int code = 0, shift = 0;
  for (int width = 4; width > 0; width /= 2)
    if (bits & width) {
      code |= code_at(part, count, width, k - first) << shift;
      part += (count * width + 7) / 8;
      shift += width;
    }
  return code;
}

bool right_encode(const Isa& isa, const MadeEncode& made) {
  const EncodeProblem& p = made.problem;
  char why[200];
  if (check_encode(p, why, sizeof why) != nullptr) {
    printf("refused: %s (%s)\n", why, made.text.c_str());
    return false;
  }
  const EncodeKernel& kernel = encode_kernel(isa);
  memset(p.y, 0xff, p.n * p.words);
  kernel.encode(&p, 0, p.n / 2);
  kernel.encode(&p, p.n / 2, p.n);
  for (int64_t i = 0; i < p.n * p.k; ++i) {
    const int code = packed_code(p.y + i / p.k * p.words, p.k, p.bits, i % p.k);
    if (code != made.expected[i]) {
      printf("%s: code %ld of row %ld is %d, not %d (%s)\n", isa.name, static_cast<long>(i % p.k),
             static_cast<long>(i / p.k), code, made.expected[i], made.text.c_str());
      return false;
    }
  }
  if (p.x_type != kFloat32) return true;
  for (int kind = kLargest; kind <= kHigh; ++kind) {
    Exact<float> found(p.n);
    const float* x = static_cast<const float*>(p.x);
    const ReduceProblem reduce = {x, found.data.get(), p.n, p.k, kind};
    kernel.reduce(&reduce, 0, p.n);
    for (int64_t row = 0; row < p.n; ++row) {
      float largest = 0, low = 0, high = 0, at = x[row * p.k];
      bool finite = true;
      for (int64_t i = row * p.k; i < (row + 1) * p.k; ++i) {
        finite = finite && fabsf(x[i]) <= 3.4028235e38f;
        if (fabsf(x[i]) > largest) largest = fabsf(at = x[i]);
        low = std::min(low, x[i]);
        high = std::max(high, x[i]);
      }
      const float expected = kind == kLargest ? largest : kind == kAtLargest ? at : kind == kLow ? low : high;
      if (finite ? found[row] != expected : found[row] == found[row]) {
        printf("%s: reduction %d of row %ld is %.9g, not %.9g (%s)\n", isa.name, kind, static_cast<long>(row),
               found[row], expected, made.text.c_str());
        return false;
      }
    }
  }
  return true;
}
