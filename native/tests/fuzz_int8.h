// Random products of integers; a part of `fuzz.cpp`, whose helpers it uses. Sums of integers must be exact. So with one
// block the only errors are from scaling a sum; with several, also from adding up its lanes as floats.

struct MadeInt8 {
  Int8Problem problem;
  std::shared_ptr<void> keep;
  std::vector<double> expected, magnitude;  // the latter: the largest partial sum, and how far lanes are apart from it
  std::string text;
};

MadeInt8 make_int8(Random& random, const Cell* cell = nullptr) {
  MadeInt8 made;
  Int8Problem& q = made.problem;
  q = Int8Problem{};
  Problem& p = q.p;
  const int bits[] = {1, 2, 4, 4, 8, 8, 3, 5, 6, 7};
  p.bits = bits[below(random, coin(random) ? 6 : 10)];
  p.batch = coin(random, 80) ? 1 : below(random, 4);
  p.m = coin(random, 30) ? 1
      : coin(random)     ? below(random, 8)
      : coin(random, 80) ? below(random, 70)
                         : below(random, 600);
  p.n = coin(random, 90) ? below(random, 40) : below(random, 300);
  p.k = coin(random, 70) ? below(random, 700) : coin(random) ? 128 * below(random, 9) : below(random, 5000);
  if (p.m < 5 && coin(random, 8)) p.k = 512 * (9 + below(random, 8));  // scales of whole segments, over 4096 codes
  if (coin(random, 1)) {                                               // longer than a sum of products of bytes may be
    p.k = 40000 + below(random, 100000);
    p.n = below(random, 5);
    p.m = below(random, 7);
  }
  if (cell != nullptr) set_cell(*cell, &p);
  if (cell == nullptr) choose_codec(random, &p);
  p.values = p.bits == 8 || is_split(p.bits) ? kValueInteger : kValueTable;
  const int64_t sizes[] = {16, 32, 64, 128, 256, 48, 1 + below(random, 100), 1 + below(random, 3000), p.k, p.k};
  p.block_size = sizes[below(random, 10)];
  if (p.block_size > p.k) p.block_size = p.k;
  if (p.block_size < 1) p.block_size = 1;
  p.words = row_bytes(&p);
  const bool selects = coin(random, 30);
  p.stack = selects ? 1 + below(random, 4) : p.batch;
  p.blocks = (p.k + p.block_size - 1) / p.block_size;
  p.zero_words = packed_bytes(p.blocks, p.bits);
  p.scale_kind = static_cast<int>(below(random, 7));
  p.x_type = static_cast<int>(below(random, 3));
  q.form = static_cast<int>(below(random, 3));
  q.affine = q.form != kSigned && coin(random, 40);
  const bool scaled = q.form != kFloats || coin(random, 40);
  const bool x_turned = coin(random, 30), y_turned = coin(random, 30), zeros = coin(random, 30),
             rows = coin(random, 20);
  const bool offsets = !zeros && p.codec == nullptr && coin(random, 30);
  if (offsets) p.x_type = kFloat32;
  const int64_t x_pad = coin(random, 20) ? below(random, 5) : 0, y_pad = coin(random, 20) ? below(random, 5) : 0;
  p.x_row = x_turned ? 1 : p.k + x_pad;
  p.x_column = x_turned ? p.m + x_pad : 1;
  const bool x_shared = coin(random, 30);  // by all matrices of a batch
  const int64_t x_matrix = (x_turned ? p.k : p.m) * (x_turned ? p.x_column : p.x_row),
                x_size = (x_shared ? std::min<int64_t>(p.batch, 1) : p.batch) * x_matrix;
  p.x_batch = x_shared ? 0 : x_matrix;
  p.y_row = y_turned ? 1 : p.n + y_pad;
  p.y_column = y_turned ? p.m + y_pad : 1;
  p.y_batch = (y_turned ? p.n : p.m) * (y_turned ? p.y_column : p.y_row);

  struct Arrays {
    Exact<uint8_t> codes, scale, offset, zero, x_zero;
    Exact<float> row_scale, x_scale, table;
    Exact<uint8_t> x, y;
    Exact<int32_t> selected;
  };
  const int64_t item = p.x_type == kFloat32 ? 4 : 2, width = p.scale_kind == 0 ? 4 : p.scale_kind <= 2 ? 2 : 1;
  const int64_t x_item = q.form == kFloats ? item : 1;
  auto arrays = std::make_shared<Arrays>(
      Arrays{Exact<uint8_t>(p.stack * p.n * p.words), Exact<uint8_t>(p.stack * p.n * p.blocks * width),
             Exact<uint8_t>(p.stack * p.n * p.blocks * width), Exact<uint8_t>(p.stack * p.n * p.zero_words),
             Exact<uint8_t>(p.batch * p.m), Exact<float>(p.stack * p.n), Exact<float>(p.batch * p.m),
             Exact<float>(int64_t{1} << p.bits), Exact<uint8_t>(x_size * x_item),
             Exact<uint8_t>(p.batch * p.y_batch * item), Exact<int32_t>(p.batch)});
  Arrays& a = *arrays;
  made.keep = arrays;

  // Consecutive integers, a multiple of them, or any.
  const int codes = 1 << p.bits, kind = p.values == kValueInteger || offsets ? 0 : static_cast<int>(below(random, 3));
  const int lowest = p.codec != nullptr ? -codes / 2
                   : p.bits == 8        ? (coin(random) ? -128 : 0)
                                        : static_cast<int>(below(random, 20)) - 15;
  for (int i = 0; i < codes; ++i)
    a.table[i] = static_cast<float>(kind == 0   ? lowest + i
                                    : kind == 1 ? lowest + (i << (p.bits == 1 ? 1 : 2))
                                                : static_cast<int>(below(random, 256)) - 128);
  for (int64_t i = 0; i < a.codes.size; ++i) a.codes[i] = static_cast<uint8_t>(random());
  // At times all as large as can be.
  if (coin(random, 10)) memset(a.codes.data.get(), coin(random) ? 255 : 0, a.codes.size);
  for (int64_t i = 0; i < a.scale.size / width; ++i) {
    const float value = 0.5f + 0.1f * fabsf(normal(random));
    const uint32_t word = float_to_bits(coin(random, 20) ? -value : value);
    const uint16_t two =
        p.scale_kind == kScaleFloat16 ? to_half(bits_to_float(word)) : to_bfloat16(bits_to_float(word));
    switch (p.scale_kind) {
      case kScaleFloat32: memcpy(&a.scale[4 * i], &word, 4); break;
      case kScaleFloat16:
      case kScaleBFloat16: memcpy(&a.scale[2 * i], &two, 2); break;
      case kScaleE8M0: a.scale[i] = static_cast<uint8_t>(120 + below(random, 12)); break;
      default: a.scale[i] = static_cast<uint8_t>(30 + below(random, 60));
    }
  }
  for (int64_t i = 0; i < a.offset.size; ++i)
    a.offset[i] = a.scale[a.offset.size - width + i % width - i / width * width];
  for (int64_t i = 0; i < a.zero.size; ++i) a.zero[i] = static_cast<uint8_t>(random());
  for (int64_t i = 0; i < a.row_scale.size; ++i) a.row_scale[i] = 1 + 0.5f * normal(random);
  // Scales that are given to floats clip some of them, or all: quotients may even be beyond 32 bits.
  const float unit = coin(random, 80) ? 0.01f : 1e-12f;
  for (int64_t i = 0; i < a.x_scale.size; ++i) a.x_scale[i] = unit * fabsf(normal(random));
  const bool extreme = coin(random, 10);
  for (int64_t i = 0; i < a.x_zero.size; ++i) a.x_zero[i] = static_cast<uint8_t>(extreme ? 255 : random());
  for (int64_t i = 0; i < x_size; ++i) {
    if (q.form != kFloats) {
      a.x[i] = static_cast<uint8_t>(extreme ? (q.form == kUnsigned ? 0 : 128) : random());
      continue;
    }
    const float value = coin(random, 2) ? 0 : normal(random);
    const uint32_t word = float_to_bits(value);
    const uint16_t two = p.x_type == kFloat16 ? to_half(value) : to_bfloat16(value);
    memcpy(&a.x[item * i], p.x_type == kFloat32 ? static_cast<const void*>(&word) : &two, item);
  }
  if (q.form == kFloats && x_size > 0 && coin(random, 10)) {
    const float odd = coin(random) ? NAN : INFINITY;
    const uint32_t word = float_to_bits(odd);
    const uint16_t two = p.x_type == kFloat16 ? (odd > 0 ? 0x7c00 : 0x7e00) : static_cast<uint16_t>(word >> 16);
    memcpy(&a.x[item * below(random, x_size)], p.x_type == kFloat32 ? static_cast<const void*>(&word) : &two, item);
  }
  p.x = a.x.data.get();
  p.y = a.y.data.get();
  p.codes = a.codes.data.get();
  p.scale = a.scale.data.get();
  p.table = a.table.data.get();
  p.zero_point = zeros ? a.zero.data.get() : nullptr;
  p.row_scale = rows ? a.row_scale.data.get() : nullptr;
  p.offset = offsets ? a.offset.data.get() : nullptr;
  choose_matrices(random, p, a.selected);
  p.selected = selects ? a.selected.data.get() : nullptr;
  q.x_scale = scaled ? a.x_scale.data.get() : nullptr;
  q.x_zero = q.affine && scaled ? a.x_zero.data.get() : nullptr;

  made.expected.assign(p.batch * p.m * p.n, 0);
  made.magnitude.assign(p.batch * p.m * p.n, 0);
  std::vector<double> squares = made.expected;
  std::vector<int32_t> x(p.k), w(p.stack * p.n * p.k);
  for (int64_t row = 0; row < p.stack * p.n; ++row)
    for (int64_t k = 0; k < p.k; ++k)
      w[row * p.k + k] = static_cast<int32_t>(a.table[code_at(p.codec, &a.codes[row * p.words], p.k, p.bits, k)]) -
                         (zeros ? code_at(&a.zero[row * p.zero_words], p.blocks, p.bits, k / p.block_size) : 0);
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t m = 0; m < p.m; ++m) {
      float scale = 0, low = 0, high = 0;
      std::vector<float> floats(p.k);
      for (int64_t k = 0; k < p.k; ++k) {
        const int64_t at = b * p.x_batch + m * p.x_row + k * p.x_column;
        if (q.form != kFloats) {
          x[k] =
              q.form == kUnsigned ? a.x[at] - (q.affine ? a.x_zero[b * p.m + m] : 128) : static_cast<int8_t>(a.x[at]);
          continue;
        }
        uint32_t word = 0;
        memcpy(&word, &a.x[item * at], item);
        floats[k] = p.x_type == kFloat32      ? bits_to_float(word)
                  : p.x_type == kBFloat16     ? bits_to_float(word << 16)
                  : (word & 0x7c00) == 0x7c00 ? NAN
                                              : static_cast<float>(half(static_cast<uint16_t>(word)));
        scale = !(fabsf(floats[k]) <= 3e38f) || scale != scale ? NAN : fmaxf(scale, fabsf(floats[k]) / 127);
        low = fminf(low, floats[k]);
        high = fmaxf(high, floats[k]);
      }
      if (q.affine && !scaled && scale == scale) scale = fmaf(high, 1 / 255.0f, -(low * (1 / 255.0f)));
      if (scaled && scale == scale) scale = a.x_scale[b * p.m + m];
      const float given = q.affine && scaled ? a.x_zero[b * p.m + m] : 0;
      const float zero = scaled ? given : q.affine && scale > 0 ? fminf(nearbyintf(-low / scale), 255) : 0;
      if (q.form == kFloats) {
        const float least = q.affine ? 0 : -128, most = q.affine ? 255 : 127;
        for (int64_t k = 0; k < p.k; ++k) {
          const float code = scale > 0 ? fminf(fmaxf(nearbyintf(floats[k] / scale + zero), least), most) : zero;
          x[k] = static_cast<int32_t>(code - zero);
        }
      }
      for (int64_t n = 0; n < p.n; ++n)
        for (int64_t block = 0; block < p.blocks && p.k > 0; ++block) {
          const int64_t row = matrix_of(p, b) * p.n + n, end = std::min((block + 1) * p.block_size, p.k);
          int64_t sum = 0, sum_x = 0;
          double terms = 0;
          for (int64_t k = block * p.block_size; k < end; ++k) {
            const int64_t term = x[k] * w[row * p.k + k];
            sum += term;
            sum_x += x[k];
            terms += static_cast<double>(term * term);
          }
          const double s =
              scale_value(p.scale_kind, &a.scale[(row * p.blocks + block) * width]) * (rows ? a.row_scale[row] : 1);
          const int64_t index = (b * p.m + m) * p.n + n;
          made.expected[index] += static_cast<double>(sum) * s * scale;
          squares[index] += terms * s * s * scale * scale;
          if (offsets) {
            const double offset = scale_value(p.scale_kind, &a.offset[(row * p.blocks + block) * width]),
                         of_x = static_cast<double>(sum_x) * scale, middle = (codes + abs(lowest)) * s;
            made.expected[index] += offset * of_x;
            squares[index] += (offset * offset + middle * middle) * of_x * of_x;
          }
          made.magnitude[index] = std::max(made.magnitude[index], fabs(made.expected[index]));
        }
    }
  for (size_t i = 0; i < squares.size() && (p.blocks > 1 || p.k > 32768 || offsets); ++i)
    made.magnitude[i] += sqrt(squares[i]);
  char text[300];
  snprintf(text, sizeof text,
           "int8: batch %ld m %ld n %ld k %ld bits %d table %d block %ld scale %d form %d scaled %d affine %d y %d "
           "zeros %d rows %d turned %d%d shared %d codec %d offsets %d",
           static_cast<long>(p.batch), static_cast<long>(p.m), static_cast<long>(p.n), static_cast<long>(p.k), p.bits,
           kind, static_cast<long>(p.block_size), p.scale_kind, q.form, scaled, q.affine, p.x_type, zeros, rows,
           x_turned, y_turned, x_shared, codec_index(p), offsets);
  made.text = text;
  return made;
}

bool right_int8(const Isa& isa, const MadeInt8& made, Pool& pool, int threads) {
  const Problem& p = made.problem.p;
  char why[200];
  if (check_int8(made.problem, why, sizeof why) != nullptr) {
    printf("refused: %s (%s)\n", why, made.text.c_str());
    return false;
  }
  memset(p.y, 0x7e, p.batch * p.y_batch * (p.x_type == kFloat32 ? 4 : 2));  // large numbers: NaN may be right
  if (!run_int8(isa, made.problem, pool, threads)) return false;
  const double roundings = int8_roundings(p);
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t m = 0; m < p.m; ++m)
      for (int64_t n = 0; n < p.n; ++n) {
        const double y = result_at(p, b * p.y_batch + m * p.y_row + n * p.y_column);
        const int64_t index = (b * p.m + m) * p.n + n;
        const double expected = made.expected[index];
        if (expected != expected && y != y) continue;
        if (p.x_type == kFloat16 && fabs(expected) > 65000 && fabs(y) > 60000) continue;
        const double size = made.magnitude[index],
                     bound = std::min(most(roundings, size), likely(roundings, size * size));
        if (!(fabs(y - expected) <= bound + result_rounding(p.x_type, expected) + 1e-30)) {
          printf("%s: y[%ld, %ld, %ld] is %.9g, not %.9g (%s)\n", isa.name, static_cast<long>(b), static_cast<long>(m),
                 static_cast<long>(n), y, expected, made.text.c_str());
          return false;
        }
      }
  return true;
}
