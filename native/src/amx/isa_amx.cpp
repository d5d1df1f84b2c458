// Floats on AMX, as integers.
//
// Numbers of x and of the weight become integers of 24 bits: so many parts of the largest of 1024 numbers of a row.
// Their three bytes, digits, are tiles of their own. Products of digits are exact, and those of one order are added up
// in one tile of results. Orders below the last bit are left out, so three digits need six products. This is Ozaki's
// scheme (https://arxiv.org/abs/2306.11975). It takes half the time of three terms of bfloat16 each, and scales of
// blocks cost nothing: they are in the digits. A weight of small integers with one scale for a row has one digit, and
// three products.
//
// Digits of x have a sign. Those of the weight have none: what each is more than it should be is what results begin
// with.
//
// What is much smaller than the largest keeps few bits. So x is looked at while it is packed, 16 rows of it at a time:
// a panel. Where a number stands out of 1024, these have a fourth digit; where that is too little for many, or one is
// not finite, very large or very small, AVX-512 multiplies the panel. Rows of the weight whose scales are not ordinary,
// or which hold NaN, are AVX-512's as well. So are few rows of x, transposed products, and blocks that are no multiple
// of 16.
//
// Rows are decoded and then multiplied, 16 at a time. Decoding one step while another is multiplied was not faster:
// what limits both are loads and stores.
#include "amx/amx.h"
#include "float/panels.h"
#include "int8/int8.h"

namespace {

constexpr int64_t kTile = 1024;      // bytes
constexpr int64_t kPiece = 256;      // of them that are decoded at a time: they stay in L1
constexpr int64_t kMostPiece = 512;  // of one digit, of whole rows, or of a segment of single bits
constexpr int64_t kSteps = kSpan / 64;
constexpr int64_t kMostBlocks = 80;  // of a chunk, and room to write more
constexpr int64_t kUnitRows = 512;   // of the weight in a unit, at most
constexpr int64_t kFewest = 5;       // rows of x that are worth a tile: with many scales more
constexpr int64_t kFewestOfMany = 8;
constexpr int64_t kTables = 1024;  // bytes of tables at the start of shared memory
constexpr int kDigits = 3;         // of a weight that is not of integers with one scale for a row

// How codes become digits.
enum Kind {
  kDirect,  // they are digits where they lie
  kPlain,   // through a table of bytes: one digit
  kScaled,  // fewer than eight bits: through a table for each block
  kLookUp,  // eight bits: through a table of 256 for each digit
  kFloats   // through floats
};

struct Detail {
  int64_t kind, w_digits;
  int64_t rows, chunks;        // of the weight in a unit, and units that they make
  int64_t panels, row_blocks;  // of x, and how many units they make
  int64_t parts;               // chunks of a row of codes
  int64_t together;            // tiles of rows that meet some x in turn
  int64_t packed;              // bytes of a panel of x
  int64_t spare;               // bytes for what AVX-512 multiplies
};

// Where the blocks of a chunk of a row are: the first, how many, and which has each 16 codes.
struct alignas(64) Place {
  int64_t first, count;
  int block[kSpan / 16];
};

// Of digits of x.
struct Sums {
  int32_t all[4][16];
  int32_t start[4][16];  // what results begin with, since digits of the weight have no sign
};

// What is known of a chunk of a panel.
struct alignas(64) Head {
  int64_t digits;               // of its numbers; 0 if they must not be digits
  alignas(64) float scale[16];  // of a row
  Sums chunk, pieces[kSpan / kPiece];
};

constexpr float kRangeOfW = 0x1p96f;   // magnitudes that are ordinary: up to this, and down to one by it
constexpr float kNoScale = 0x1p-120f;  // the largest scale of a block of zeros, of any kind

// Digits of the weight have no sign: each is so much more, and all of them so much.
constexpr int32_t kMore = 128;
constexpr float kAllMore = kMore * (65536 + 256 + 1);

// Codes of a row that are decoded at a time: whole segments.
EQQ_INLINE int64_t piece_of(const Problem& p, const Detail& d) {
  return d.w_digits == 1 || p.k <= kMostPiece ? kMostPiece : max64(kPiece, 512 / p.bits);
}

// Shared memory: tables, places, heads, and tiles of x. The panels of a unit lie side by side for each piece, in the
// order in which they are read.
EQQ_INLINE int64_t heads_at(const Detail& d) { return kTables + d.parts * static_cast<int64_t>(sizeof(Place)); }
EQQ_INLINE int64_t head_of(const Detail& d, int64_t batch, int64_t panel, int64_t chunk) {
  return heads_at(d) + ((batch * d.panels + panel) * d.parts + chunk) * static_cast<int64_t>(sizeof(Head));
}
EQQ_INLINE int64_t x_at(const Problem& p, const Detail& d) { return head_of(d, p.batch, 0, 0); }
EQQ_INLINE int64_t piece_at(const Problem& p, const Detail& d, int64_t batch, int64_t panel, int64_t first) {
  const int64_t block = panel / kUnitPanels * kUnitPanels, panels = min64(kUnitPanels, d.panels - block);
  const int64_t steps = min64(div_up(p.k - first, 64), piece_of(p, d) / 64);
  return x_at(p, d) + (batch * d.panels + block) * d.packed +
         (panels * (first / 64) + (panel - block) * steps) * kMostDigits * kTile;
}

//
// x
//

void keep_sums(const Problem& p, const Detail& d, const I* sums, Sums& out) {
  const int32_t more = d.w_digits == 1 ? -lowest_integer(p, integer_factor(p)) : kMore;
  for (int order = 0; order < 4; ++order) {
    I start = _mm512_setzero_si512();
    for (int digit = 0; digit <= order && digit < d.w_digits; ++digit)
      start = _mm512_sub_epi32(start, _mm512_mullo_epi32(sums[order - digit], _mm512_set1_epi32(more)));
    _mm512_store_si512(out.all[order], sums[order]);
    _mm512_store_si512(out.start[order], start);
  }
}

// Packs a chunk of a panel. Whether so many digits are enough.
template <int kX>
bool pack(const Problem& p, const Detail& d, int64_t batch, int64_t panel, const Span& span, char* shared) {
  const int64_t size = piece_of(p, d);
  Head* head = reinterpret_cast<Head*>(shared + head_of(d, batch, panel, span.first / kSpan));
  I all[4] = {};
  const auto where = [&](int64_t k) {
    const int64_t piece = piece_at(p, d, batch, panel, span.first + k / size * size);
    return Digits{reinterpret_cast<uint8_t*>(shared) + piece + k % size / 64 * kX * kTile + k % 64 * 16, 64, kTile};
  };
  const auto keep = [&](int64_t end, const I* sums) {
    if (end % size > 0 && end < round_up(span.count, 64)) return false;
    keep_sums(p, d, sums, head->pieces[(end - 1) / size]);
    for (int digit = 0; digit < 4; ++digit) all[digit] = _mm512_add_epi32(all[digit], sums[digit]);
    return true;
  };
  const bool enough = pack_digits<kX>(p, span, head->scale, where, keep);
  keep_sums(p, d, all, head->chunk);
  return enough;
}

void pack(const Problem& p, const Detail& d, int64_t batch, int64_t panel, int64_t first, char* shared) {
  const Span span(p, batch, panel, first);
  const bool short_rows = d.w_digits > 1 && p.k < kShort;
  const int64_t digits =
      pack_fewest(p, span, short_rows, [&](auto count) { return pack<count.value>(p, d, batch, panel, span, shared); });
  reinterpret_cast<Head*>(shared + head_of(d, batch, panel, first / kSpan))->digits = digits;
}

//
// The weight
//

// Bytes without their sign that stand for numbers, but for zero: others are NaN or infinite, or too small for integers
// that hold the largest as well.
struct Numbers {
  int first, last;
};
EQQ_INLINE Numbers numbers_of(const Problem& p) {
  return p.values == kValueE4M3 ? Numbers{1, 126} : p.values == kValueE5M2 ? Numbers{40, 123} : Numbers{1, 127};
}

// The least and the largest of the values of codes, or NaN if some code stands for no finite number without a byte
// telling so.
struct Reach {
  float low, high;
};
Reach reach_of(const Problem& p) {
  Reach a = {0, 0};
  for (int i = 0; i < 1 << p.bits; ++i) {
    if (p.bits == 8 && (i & 127) > numbers_of(p).last) continue;
    if (!(p.table[i] - p.table[i] == 0)) return {__builtin_nanf(""), __builtin_nanf("")};
    a.low = p.table[i] < a.low ? p.table[i] : a.low;
    a.high = p.table[i] > a.high ? p.table[i] : a.high;
  }
  return a;
}

// The largest magnitude of values of codes less a zero point, which is a code as well. Of a byte fewer codes may occur.
float most_of(const Problem& p, const Reach& a) {
  const float last = p.values == kValueInteger ? a.high - a.low : static_cast<float>((1 << p.bits) - 1);
  const float low = p.zero_point == nullptr ? a.low : a.low - last;
  return a.high > -low ? a.high : -low;
}

// Some codes of 16 rows, and where they go.
struct Codes {
  const uint8_t* from;
  int64_t stride, last;  // bytes from one row to the next; the last row
  int64_t steps;         // of 64 codes
  const float *scale,
      *zero;         // of rows and blocks: `kMostBlocks` apart. Values less a zero point times a scale are integers
  const int* block;  // of each 16 codes
  uint8_t* out;
};

template <int kBits>
EQQ_INLINE I shifted(I codes, int plane) {  // code `plane` of a byte to bit 2 and up
  const int by = (kBits == 8 ? 0 : plane * kBits) - 2;
  return by < 0 ? _mm512_slli_epi16(codes, -by) : _mm512_srli_epi16(codes, by);
}

EQQ_INLINE I digits_of(F value, F scale) {
  return _mm512_cvtps_epi32(_mm512_fmadd_ps(value, scale, _mm512_set1_ps(kAllMore)));
}

// Through a table of integers for each block, whose bytes are digits. A step has codes of `kBlocks` blocks. With eight
// bits there is a code of at most four in each byte.
template <int kBits, int kBlocks, bool kZero>
void decode_scaled(const Codes& a, F table) {
  const I mask = _mm512_set1_epi8(0x3c);
  constexpr int kPlanes = 8 / kBits;
  for (int64_t segment = 0; segment * kPlanes < a.steps; ++segment) {
    uint8_t* to = a.out + segment * kPlanes * kDigits * kTile;
    const int* block = a.block + segment * kPlanes * 4;
#pragma GCC unroll 4
    for (int64_t i = 0; i < kRows; ++i) {
      const I codes = _mm512_loadu_si512(a.from + min64(i, a.last) * a.stride + 64 * segment);
      const float *scale = a.scale + i * kMostBlocks, *zero = a.zero + i * kMostBlocks;
#pragma GCC unroll 8
      for (int plane = 0; plane < kPlanes; ++plane) {
        I digits[kBlocks];
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
          const int at = block[4 * plane + b * (4 / kBlocks)];
          digits[b] =
              digits_of(kZero ? _mm512_sub_ps(table, _mm512_set1_ps(zero[at])) : table, _mm512_set1_ps(scale[at]));
        }
        const I index = shifted<kBits>(codes, plane);
#pragma GCC unroll 3
        for (int digit = 0; digit < kDigits; ++digit) {
          const I some =
              _mm512_ternarylogic_epi32(index, mask, _mm512_set1_epi8(static_cast<char>(kDigits - 1 - digit)), 0xea);
          I bytes = _mm512_permutexvar_epi8(some, digits[0]);
#pragma GCC unroll 4
          for (int b = 1; b < kBlocks; ++b)
            bytes = _mm512_mask_permutexvar_epi8(bytes, ~uint64_t{0} << (64 / kBlocks * b), some, digits[b]);
          _mm512_store_si512(to + (plane * kDigits + digit) * kTile + 64 * i, bytes);
        }
      }
    }
  }
}

// Through a table of bytes in a register.
template <int kBits>
void decode_plain(const Codes& a, I table) {
  constexpr int kPlanes = 8 / kBits;
  for (int64_t segment = 0; segment * kPlanes < a.steps; ++segment)
#pragma GCC unroll 4
    for (int64_t i = 0; i < kRows; ++i) {
      const I codes = _mm512_loadu_si512(a.from + min64(i, a.last) * a.stride + 64 * segment);
#pragma GCC unroll 8
      for (int plane = 0; plane < kPlanes; ++plane)
        _mm512_store_si512(a.out + (segment * kPlanes + plane) * kTile + 64 * i,
                           _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, plane * kBits), table));
    }
}

EQQ_INLINE bool has_others(I codes, Numbers numbers) {
  const I some = _mm512_and_si512(codes, _mm512_set1_epi8(127));
  const __mmask64 low = _mm512_mask_cmplt_epu8_mask(_mm512_test_epi8_mask(some, some), some,
                                                    _mm512_set1_epi8(static_cast<char>(numbers.first)));
  return (low | _mm512_cmpgt_epu8_mask(some, _mm512_set1_epi8(static_cast<char>(numbers.last)))) != 0;
}

// Through a table of 256 bytes for each digit. Returns the rows with codes that are no such numbers.
uint32_t decode_look_up(const Problem& p, const Codes& a, const uint8_t* tables) {
  const Numbers numbers = numbers_of(p);
  uint32_t rows = 0;
  for (int64_t step = 0; step < a.steps; ++step)
#pragma GCC unroll 2
    for (int64_t i = 0; i < kRows; ++i) {
      const I codes = _mm512_loadu_si512(a.from + min64(i, a.last) * a.stride + 64 * step);
      const __mmask64 upper = _mm512_movepi8_mask(codes);
#pragma GCC unroll 3
      for (int digit = 0; digit < kDigits; ++digit) {
        const uint8_t* table = tables + 256 * digit;
        const I low = _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
        const I high = _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), codes, _mm512_load_si512(table + 192));
        _mm512_store_si512(a.out + (step * kDigits + digit) * kTile + 64 * i, _mm512_mask_blend_epi8(upper, low, high));
      }
      rows |= static_cast<uint32_t>(has_others(codes, numbers)) << i;
    }
  return rows;
}

// Through floats, 64 of a row at a time. Returns the same.
uint32_t decode_floats(const Problem& p, const Codes& a) {
  // Groups of four codes go where the bytes of their integers, taken apart, are in order.
  const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const I quarters = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const Numbers numbers = numbers_of(p);
  uint32_t rows = 0;
  for (int64_t step = 0; step < a.steps; ++step)
    for (int64_t i = 0; i < kRows; ++i) {
      const I codes = _mm512_loadu_si512(a.from + min64(i, a.last) * a.stride + 64 * step);
      alignas(64) uint8_t bytes[64];
      _mm512_store_si512(bytes, _mm512_permutexvar_epi32(order, codes));
      const auto spread = [&](const float* of) {
        const float* row = of + i * kMostBlocks;
        const __m128 some = _mm_setr_ps(row[a.block[4 * step]], row[a.block[4 * step + 1]], row[a.block[4 * step + 2]],
                                        row[a.block[4 * step + 3]]);
        return _mm512_permutexvar_ps(quarters, _mm512_castps128_ps512(some));
      };
      const F scale = spread(a.scale), zero = p.zero_point == nullptr ? _mm512_setzero_ps() : spread(a.zero);
      I digits[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const uint8_t* from = bytes + 16 * j;
        const F value = p.values == kValueInteger ? _mm512_add_ps(Avx512::integers(from), _mm512_set1_ps(p.table[0]))
                      : p.values == kValueE4M3    ? Avx512::e4m3(from)
                      : p.values == kValueE5M2    ? Avx512::e5m2(from)
                                                  : Avx512::bytes256(from, p.table);
        digits[j] = bytes_apart(digits_of(_mm512_sub_ps(value, zero), scale));
      }
      const I low0 = _mm512_unpacklo_epi32(digits[0], digits[1]), low1 = _mm512_unpacklo_epi32(digits[2], digits[3]);
      const I all[3] = {_mm512_unpacklo_epi64(low0, low1), _mm512_unpackhi_epi64(low0, low1),
                        _mm512_unpacklo_epi64(_mm512_unpackhi_epi32(digits[0], digits[1]),
                                              _mm512_unpackhi_epi32(digits[2], digits[3]))};
#pragma GCC unroll 3
      for (int digit = 0; digit < kDigits; ++digit)
        _mm512_store_si512(a.out + (step * kDigits + digit) * kTile + 64 * i, all[kDigits - 1 - digit]);
      rows |= static_cast<uint32_t>(has_others(codes, numbers)) << i;
    }
  return rows;
}

//
// Products
//

// Digits of the weight and of x whose products count: those with the sum of their orders at most this, that of the last
// of x.
constexpr int last_order(int x) { return x - 1; }

// Tiles 0 to 3 are results, by their order; then there are three of the weight and one of x.
template <int kOrder, int kDigit>
EQQ_INLINE void multiply() {
#define EQQ_MULTIPLY(ORDER, DIGIT, TILE) \
  if constexpr (kOrder == ORDER && kDigit == DIGIT) _tile_dpbusd(ORDER, TILE, 7);
  EQQ_MULTIPLY(0, 0, 4)
  EQQ_MULTIPLY(1, 0, 4)
  EQQ_MULTIPLY(2, 0, 4)
  EQQ_MULTIPLY(3, 0, 4)
  EQQ_MULTIPLY(1, 1, 5)
  EQQ_MULTIPLY(2, 1, 5)
  EQQ_MULTIPLY(3, 1, 5)
  EQQ_MULTIPLY(2, 2, 6)
  EQQ_MULTIPLY(3, 2, 6)
#undef EQQ_MULTIPLY
}

// A digit of x times those of the weight that count, which are loaded with the first.
template <int kW, int kX, int kDigit>
EQQ_INLINE void multiply_digit(const uint8_t* w, int64_t w_row, const uint8_t* x) {
  if constexpr (kDigit < kX) {
    constexpr int kLast = last_order(kX);
    _tile_loadd(7, x + kDigit * kTile, 64);
    if constexpr (kDigit == 0) _tile_loadd(4, w, w_row);
    multiply<kDigit, 0>();
    if constexpr (kDigit == 0 && kW > 1) _tile_loadd(5, w + kTile, w_row);
    if constexpr (kW > 1 && kDigit + 1 <= kLast) multiply<kDigit + 1, 1>();
    if constexpr (kDigit == 0 && kW > 2 && kLast >= 2) _tile_loadd(6, w + 2 * kTile, w_row);
    if constexpr (kW > 2 && kDigit + 2 <= kLast) multiply<kDigit + 2, 2>();
  }
}

// Bytes of 16 rows that come to L2 while something else is multiplied, some lines in each step: all at once they would
// stand in each other's way, and hardware does not fetch so many rows by itself.
struct Lines {
  const char* from = nullptr;
  int64_t stride = 0, bytes = 0, rows = 0, lines = 0;  // how far apart rows are, bytes of each, and lines in a step
  int64_t row = 0, at = 0;

  EQQ_INLINE void some(Lines& a) {
    for (int64_t i = 0; i < a.lines && a.row < a.rows; ++i) {
      _mm_prefetch(a.from + a.row * a.stride + a.at, _MM_HINT_T1);
      a.at += 64;
      if (a.at >= a.bytes) a.at = 0, ++a.row;
    }
  }
};

struct Next {
  Lines codes, scales;
};

// Some codes of 16 rows of the weight, and a panel of x.
struct Piece {
  const uint8_t* w;
  int64_t w_row, w_next;  // bytes to the next row, and to the next 64 codes
  const uint8_t* x;
  int64_t steps;            // of 64 codes
  const Sums* sums;         // of x, for all codes whose results are stored together
  bool first, last;         // whether results begin, or are to be stored:
  int32_t (*results)[256];  // here
};

// All rows of a result begin alike.
template <int kOrders>
EQQ_INLINE void begin_results(const Sums& sums) {
  settle(&sums);
  _tile_loadd(0, sums.start[0], 0);
  if constexpr (kOrders > 1) _tile_loadd(1, sums.start[1], 0);
  if constexpr (kOrders > 2) _tile_loadd(2, sums.start[2], 0);
  if constexpr (kOrders > 3) _tile_loadd(3, sums.start[3], 0);
}

// What tiles held: is added to the sums of 16 rows and a panel while others are multiplied.
struct Pending {
  int32_t (*results)[256];  // for each order
  int64_t orders;
  const float* x_scale;  // of rows of x
  const Sums* x_sums;
  float factor[16];  // what a result of a row is, but for the scale of x
  int32_t zero[16];  // what codes of a row are less
  bool zeros;        // whether they are
  float* sums;
  int64_t done = kRows;     // rows
  bool first, last;         // whether sums begin, or are to be written:
  int64_t at, rows, lanes;  // here, so many of them
};

template <int kOrders>
EQQ_INLINE void store_results(int32_t (*results)[256]) {
  _tile_stored(0, results[0], 64);
  if constexpr (kOrders > 1) _tile_stored(1, results[1], 64);
  if constexpr (kOrders > 2) _tile_stored(2, results[2], 64);
  if constexpr (kOrders > 3) _tile_stored(3, results[3], 64);
}

// The next rows of what is pending.
template <int kOrders, bool kZeros>
EQQ_INLINE void finish_rows(const Pending& a, int64_t rows) {
  const F scale = _mm512_load_ps(a.x_scale);
  for (int64_t i = a.done; i < a.done + rows; ++i) {
    F sum;
#pragma GCC unroll 4
    for (int order = 0; order < kOrders; ++order) {
      I result = _mm512_load_si512(a.results[order] + 16 * i);
      if (kZeros)
        result = _mm512_sub_epi32(
            result, _mm512_mullo_epi32(_mm512_load_si512(a.x_sums->all[order]), _mm512_set1_epi32(a.zero[i])));
      const F part = _mm512_cvtepi32_ps(result);
      sum = order == 0 ? part : _mm512_fmadd_ps(sum, _mm512_set1_ps(256), part);
    }
    const F before = a.first ? _mm512_setzero_ps() : _mm512_load_ps(a.sums + 16 * i);
    _mm512_store_ps(a.sums + 16 * i, _mm512_fmadd_ps(_mm512_mul_ps(sum, scale), _mm512_set1_ps(a.factor[i]), before));
  }
}

template <bool kZeros>
EQQ_INLINE void finish_rows_of(const Pending& a, int64_t rows) {
  a.orders == 2   ? finish_rows<2, kZeros>(a, rows)
  : a.orders == 3 ? finish_rows<3, kZeros>(a, rows)
                  : finish_rows<4, kZeros>(a, rows);
}

EQQ_INLINE void finish_some(const Problem& p, Pending& a, int64_t rows) {
  if (a.done == kRows) return;
  settle(a.results);
  if (a.zeros) {
    finish_rows_of<true>(a, rows);
  } else {
    finish_rows_of<false>(a, rows);
  }
  a.done += rows;
  if (a.done == kRows && a.last) write_results(p, a.at, a.rows, a.lanes, a.sums);
}

void finish(const Problem& p, Pending& a) {
  while (a.done < kRows) finish_some(p, a, kRows / 4);
}

// Some steps. The results before are finished meanwhile.
template <int kW, int kX>
void multiply_piece(const Problem& p, const Piece& a, Next& next, Pending& before) {
  constexpr int kOrders = last_order(kX) + 1;
  if (a.first) begin_results<kOrders>(*a.sums);
  const uint8_t *w = a.w, *x = a.x;
  for (int64_t step = 0; step < a.steps; ++step, w += a.w_next, x += kX * kTile) {
    settle(w);
    multiply_digit<kW, kX, 0>(w, a.w_row, x);
    Lines::some(next.codes);
    multiply_digit<kW, kX, 1>(w, a.w_row, x);
    Lines::some(next.scales);
    multiply_digit<kW, kX, 2>(w, a.w_row, x);
    multiply_digit<kW, kX, 3>(w, a.w_row, x);
    finish_some(p, before, kRows / 4);
  }
  finish(p, before);
  if (a.last) store_results<kOrders>(a.results);
}

using Multiply = void (*)(const Problem& p, const Piece& a, Next& next, Pending& before);

Multiply multiply_of(int64_t w_digits, int64_t x_digits) {
  if (w_digits == 1)
    return x_digits == 2 ? multiply_piece<1, 2> : x_digits == 3 ? multiply_piece<1, 3> : multiply_piece<1, 4>;
  return x_digits == 2 ? multiply_piece<kDigits, 2>
       : x_digits == 3 ? multiply_piece<kDigits, 3>
                       : multiply_piece<kDigits, 4>;
}

// What the lowest of these products stands for.
float lowest_power(int64_t w_digits) { return w_digits == 1 ? 1 : 65536; }

//
// Problems
//

bool takes(const Problem* problem) {
  const Problem& p = *problem;
  if (p.transpose || p.k <= 0 || (p.blocks > 1 && p.block_size % 16 != 0)) return false;
  if (p.m < (p.blocks > 1 && p.block_size % 32 != 0 ? kFewestOfMany : kFewest)) return false;
  const float most = most_of(p, reach_of(p));
  return most >= 0x1p-32f && most <= 0x1p32f;
}

// The memory of a thread.
struct Room {
  int64_t bytes, unpacked, results, scales, sums, spare, all;  // where these are, behind what is decoded

  explicit Room(const Detail& d) {
    bytes = kMostPiece / 64 * d.w_digits * kTile;
    unpacked = bytes + kRows * kMostPiece;
    results = unpacked + round_up(kStepRoom, 64);
    scales = results + 8 * kTile;
    sums = scales + 2 * 4 * kRows * kMostBlocks;
    spare = sums + d.together * min64(d.panels, kUnitPanels) * kTile;
    all = spare + d.spare;
  }
};

void plan(const Problem* problem, int64_t threads, Plan* out) {
  const Problem& p = *problem;
  Detail d;
  const bool integers = p.blocks <= 1 && integer_factor(p) > 0;
  d.kind = integers                                 ? (p.bits == 8 ? kDirect : kPlain)
         : p.bits < 8                               ? kScaled
         : p.blocks <= 1 && p.zero_point == nullptr ? kLookUp
                                                    : kFloats;
  d.w_digits = integers ? 1 : kDigits;
  d.panels = div_up(p.m, kRows);
  d.row_blocks = div_up(d.panels, kUnitPanels);
  d.parts = div_up(p.k, kSpan);
  d.packed = div_up(p.k, 64) * kMostDigits * kTile;
  int64_t rows = div_up(p.n * p.batch * d.row_blocks, (d.panels > 1 ? 4 : 16) * threads);
  rows = max64(rows, (int64_t{1} << 18) / (p.m * p.k));
  d.rows = min64(round_up(min64(rows, p.n), kRows), kUnitRows);
  d.chunks = div_up(p.n, d.rows);
  d.together = d.panels > 1 && d.parts > 1 ? d.rows / kRows : 1;
  d.spare = spare_of(kMatmulAvx512Vbmi, p, d.rows);
  out->parts = p.batch * d.panels * d.parts;
  out->shared_bytes = x_at(p, d) + p.batch * d.panels * d.packed;
  out->units = p.batch * d.row_blocks * d.chunks;
  out->own_bytes = round_up(Room(d).all, 64);
  // So few rows at a time that packed x stays in the cache, yet units for all threads.
  out->rows = kRows * kUnitPanels * div_up(4 * threads, p.batch * d.chunks);
  set_detail(d, out);
}

// What makes integers of the values of codes. A power of two keeps floats of eight bits as they are.
float integers_in_one(float most) {
  float power = 1;
  const float largest = largest_of(kDigits) / most;
  while (power > largest) power /= 2;
  while (power * 2 <= largest) power *= 2;
  return power;
}

// The bytes of the digits of 256 values, high ones first.
void fill_tables(const Problem& p, uint8_t* tables) {
  const float most = most_of(p, reach_of(p)), factor = integers_in_one(most);
  for (int i = 0; i < 256; i += 16) {
    const F values = _mm512_loadu_ps(p.table + i);
    const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(values), _mm512_set1_ps(most), _CMP_LE_OQ);
    alignas(64) uint8_t bytes[64];
    _mm512_store_si512(bytes, digits_of(_mm512_maskz_mov_ps(finite, values), _mm512_set1_ps(factor)));
    for (int j = 0; j < 16; ++j)
      for (int digit = 0; digit < kDigits; ++digit) tables[256 * digit + i + j] = bytes[4 * j + kDigits - 1 - digit];
  }
}

void find_blocks(const Problem& p, int64_t first, Place* out) {
  const int64_t size = p.blocks <= 1 ? p.k : p.block_size, last = (min64(first + kSpan, p.k) - 1) / size;
  out->first = first / size;
  out->count = last + 1 - out->first;
  for (int64_t i = 0; i < kSpan / 16; ++i)
    out->block[i] = static_cast<int>(min64((first + 16 * i) / size, last) - out->first);
}

void prepare(const Problem* problem, const Plan* plan, void* memory, int64_t part) {
  const Problem& p = *problem;
  const Detail d = detail_of<Detail>(plan);
  char* shared = static_cast<char*>(memory);
  if (part == 0 && d.kind == kLookUp) fill_tables(p, reinterpret_cast<uint8_t*>(shared));
  const int64_t chunk = part % d.parts, panel = part / d.parts % d.panels, batch = part / d.parts / d.panels;
  if (part < d.parts) find_blocks(p, chunk * kSpan, reinterpret_cast<Place*>(shared + kTables) + chunk);
  pack(p, d, batch, panel, chunk * kSpan, shared);
}

// Rows of the weight that a thread multiplies.
struct Unit {
  const Problem& p;
  const Detail& d;
  const int64_t row, count;     // the first, and how many
  const uint8_t* const tables;  // of 256
  const Place* const places;    // of chunks
  uint8_t *const decoded, *const bytes, *const room;
  float *const scales, *const zeros;      // of 16 rows and the blocks of a chunk
  const int64_t all_scales;               // of the whole weight
  const Reach reach;                      // of values of codes
  const float most;                       // the largest magnitude, zero points too
  float integer = 0;                      // what one is if the scale of its row is 1
  I table = _mm512_setzero_si512();       // of bytes
  F values;                               // the table, again and again
  F factor = _mm512_setzero_ps();         // what an integer of a row is
  I zero = _mm512_setzero_si512();        // what codes of a row are less, if they are digits
  uint32_t odd[kUnitRows / kRows] = {0};  // rows that are not ordinary

  Unit(const Problem& p, const Detail& d, int64_t batch, int64_t first, int64_t count, const char* shared, char* own)
      : p(p), d(d), row(first_row(&p, batch) + first), count(count), tables(reinterpret_cast<const uint8_t*>(shared)),
        places(reinterpret_cast<const Place*>(shared + kTables)), decoded(reinterpret_cast<uint8_t*>(own)),
        bytes(decoded + Room(d).bytes), room(decoded + Room(d).unpacked),
        scales(reinterpret_cast<float*>(own + Room(d).scales)), zeros(scales + kRows * kMostBlocks),
        all_scales((p.selected == nullptr ? p.batch : p.stack) * p.n * p.blocks), reach(reach_of(p)),
        most(most_of(p, reach)) {
    if (d.w_digits == 1) {
      const int64_t factor = integer_factor(p);
      integer = 1.0f / static_cast<float>(factor);
      table = integers_table(p, factor);
    }
    if (d.kind == kLookUp) integer = 1 / integers_in_one(most);
    alignas(64) float some[16];
    for (int i = 0; i < 16; ++i) some[i] = p.table[i & ((1 << min64(p.bits, 4)) - 1)];
    values = _mm512_load_ps(some);
  }

  // Whether scales are in digits.
  bool in_blocks() const { return d.kind == kScaled || d.kind == kFloats; }

  // The largest magnitude in each of 16 vectors.
  EQQ_INLINE I largest_in_rows(const F* rows) {
    const auto larger = [](I a, I b) { return _mm512_max_epu32(a, b); };
    const I magnitude = _mm512_set1_epi32(0x7fffffff);
    I a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_and_si512(_mm512_castps_si512(rows[i]), magnitude);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      a[i] = larger(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      a[i] = larger(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 3
    for (int i = 0, j = 4; i < 6; i += 2, ++j)
      a[j] = larger(_mm512_shuffle_i32x4(a[i], a[i + 1], 0x88), _mm512_shuffle_i32x4(a[i], a[i + 1], 0xdd));
    return a[6];
  }

  // Sixteen scales of 16 rows, of which `some` are real.
  template <int kKind>
  EQQ_INLINE void load_scales(const Problem& p, int64_t first, int64_t last, int64_t block, __mmask16 some, F* out) {
    const int64_t width = scale_bytes(kKind);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kRows; ++i) {
      const int64_t row = min64(first + i, last);
      out[i] =
          Decode<Avx512>::some_scales(kKind, static_cast<const uint8_t*>(p.scale) + (row * p.blocks + block) * width);
      if (p.row_scale != nullptr) out[i] = _mm512_mul_ps(out[i], _mm512_set1_ps(p.row_scale[row]));
      out[i] = _mm512_maskz_mov_ps(some, out[i]);
    }
  }
  void load_scales(int64_t first, int64_t last, int64_t block, int64_t count, F* out) const {
    if (last * p.blocks + block + 16 > all_scales) {
      for (int64_t i = 0; i < kRows; ++i) {
        float rest[16] = {0};
        decode_scales_avx512(&p, min64(first + i, last), block, block + min64(count, 16), rest);
        out[i] = _mm512_loadu_ps(rest);
      }
      return;
    }
    switch (p.scale_kind) {
      case kScaleFloat16: return load_scales<kScaleFloat16>(p, first, last, block, first_few(count), out);
      case kScaleBFloat16: return load_scales<kScaleBFloat16>(p, first, last, block, first_few(count), out);
      case kScaleE8M0: return load_scales<kScaleE8M0>(p, first, last, block, first_few(count), out);
      case kScaleE4M3: return load_scales<kScaleE4M3>(p, first, last, block, first_few(count), out);
      case kScaleE5M2: return load_scales<kScaleE5M2>(p, first, last, block, first_few(count), out);
      case kScaleUE4M4: return load_scales<kScaleUE4M4>(p, first, last, block, first_few(count), out);
      default: return load_scales<kScaleFloat32>(p, first, last, block, first_few(count), out);
    }
  }

  // Notes which rows are not ordinary, and returns those that are.
  __mmask16 see(int64_t tile, F largest) {
    const __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const __mmask16 ordinary = _mm512_mask_cmp_ps_mask(some, largest, _mm512_set1_ps(1 / kRangeOfW), _CMP_GE_OQ) &
                               _mm512_cmp_ps_mask(largest, _mm512_set1_ps(kRangeOfW), _CMP_LE_OQ);
    odd[tile] |= some & static_cast<__mmask16>(~ordinary);
    return ordinary;
  }

  // The scales of 16 rows that have one each, and their zero points.
  void fetch_rows(int64_t tile) {
    const int64_t at = row + kRows * tile, last = min64(at + kRows, row + count) - 1;
    const int64_t width = scale_bytes(p.scale_kind);
    F values;
    if (at + kRows <= all_scales) {
      values = Decode<Avx512>::some_scales(p.scale_kind, static_cast<const uint8_t*>(p.scale) + at * width);
      if (p.row_scale != nullptr) values = _mm512_mul_ps(values, _mm512_loadu_ps(p.row_scale + at));
    } else {
      float all[16] = {0};
      for (int64_t i = 0; i <= last - at; ++i) decode_scales_avx512(&p, at + i, 0, 1, all + i);
      values = _mm512_loadu_ps(all);
    }
    see(tile,
        _mm512_mul_ps(_mm512_abs_ps(_mm512_maskz_mov_ps(first_few(last + 1 - at), values)), _mm512_set1_ps(most)));
    factor = _mm512_mul_ps(values, _mm512_set1_ps(integer));
    if (p.zero_point == nullptr) return;
    int32_t all[16] = {0};
    for (int64_t i = 0; i <= last - at; ++i) unpack_zero_points(p, at + i, 0, 1, all + i);
    zero = _mm512_loadu_si512(all);
  }

  // The scales of the blocks of a chunk of 16 rows, as factors of integers. Nothing is loaded that was just stored in
  // smaller pieces: such a load waits for all products before it.
  void fetch(int64_t tile, int64_t part) {
    const Place& place = places[part];
    const int64_t at = row + kRows * tile, last = min64(at + kRows, row + count) - 1, begin = place.first;
    I most_bits = _mm512_setzero_si512();  // of rows
    for (int64_t b = 0; b < place.count; b += 16) {
      F values[16];
      load_scales(at, last, begin + b, place.count - b, values);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kRows; ++i) _mm512_storeu_ps(scales + i * kMostBlocks + b, values[i]);
      for (int64_t i = 0; i < (p.zero_point == nullptr ? 0 : kRows); ++i) {
        float* zero = zeros + i * kMostBlocks + b;
        unpack_zero_points(p, min64(at + i, last), begin + b, begin + min64(b + 16, place.count), zero);
        const F from = _mm512_loadu_ps(zero), above = _mm512_sub_ps(_mm512_set1_ps(reach.high), from),
                below = _mm512_sub_ps(from, _mm512_set1_ps(reach.low));
        values[i] = _mm512_mul_ps(values[i], _mm512_max_ps(above, below));
      }
      most_bits = _mm512_max_epu32(most_bits, largest_in_rows(values));
    }
    const F largest = _mm512_mul_ps(_mm512_castsi512_ps(most_bits), _mm512_set1_ps(p.zero_point == nullptr ? most : 1));
    const __mmask16 ordinary = see(tile, largest);
    factor = _mm512_mul_ps(largest, _mm512_set1_ps(1 / largest_of(kDigits)));
    alignas(64) float inverse[16];
    _mm512_store_ps(inverse, _mm512_maskz_div_ps(ordinary, _mm512_set1_ps(largest_of(kDigits)), largest));
    // A block that is far below the largest would keep few bits.
    const F least = _mm512_set1_ps(largest_of(kDigits) / 1024 / most);
    for (int64_t i = 0; i < kRows; ++i)
      for (int64_t b = 0; b < place.count; b += 16) {
        const F one = _mm512_loadu_ps(scales + i * kMostBlocks + b),
                scaled = _mm512_mul_ps(one, _mm512_set1_ps(inverse[i]));
        const __mmask16 real =
            _mm512_cmp_ps_mask(_mm512_abs_ps(one), _mm512_set1_ps(kNoScale), _CMP_GT_OQ) & first_few(place.count - b);
        odd[tile] |= static_cast<uint32_t>(_mm512_mask_cmp_ps_mask(real, _mm512_abs_ps(scaled), least, _CMP_LT_OQ) != 0)
                  << i;
        _mm512_storeu_ps(scales + i * kMostBlocks + b, scaled);
      }
  }

  // What multiplying these codes of 16 rows reads, if it is fetched in so many steps.
  Next lines_of(int64_t tile, int64_t first, int64_t last, int64_t steps) const {
    const int64_t at = row + kRows * tile, rows = min64(count - kRows * tile, kRows);
    const int64_t width = scale_bytes(p.scale_kind);
    const int64_t begin = places[first / kSpan].first,
                  end = places[(last - 1) / kSpan].first + places[(last - 1) / kSpan].count;
    Next next;
    if (rows <= 0 || d.kind == kDirect) return next;
    next.codes = {reinterpret_cast<const char*>(p.codes) + at * p.words + first * p.bits / 8,
                  p.words,
                  (last - first) * p.bits / 8,
                  rows,
                  0,
                  0,
                  0};
    next.codes.lines = div_up(div_up(next.codes.bytes, 64) * rows, steps);
    if (!in_blocks()) return next;
    next.scales = {static_cast<const char*>(p.scale) + (at * p.blocks + begin) * width,
                   p.blocks * width,
                   (end - begin) * width,
                   rows,
                   0,
                   0,
                   0};
    next.scales.lines = div_up(div_up(next.scales.bytes, 64) * rows, steps);
    return next;
  }

  // Codes `first` to `last` of 16 rows as tiles: where they are, and how far apart their rows and steps. What does not
  // lie in memory as whole segments do is copied, a byte for each code.
  const uint8_t* decode(int64_t tile, int64_t first, int64_t last, int64_t chunk, int64_t* w_row, int64_t* w_next) {
    const int64_t segment = 512 / p.bits, steps = div_up(last - first, 64), real = min64(count - kRows * tile, kRows);
    Codes a = {p.codes + (row + kRows * tile) * p.words + first * p.bits / 8,
               p.words,
               real - 1,
               steps,
               scales,
               zeros,
               places[chunk / kSpan].block + (first - chunk) / 16,
               decoded};
    const bool direct = first + round_up(last - first, segment) <= p.k;
    if (!direct) {
      const Integers raw = {};
      memset(bytes, 0, kRows * kMostPiece);
      for (int64_t i = 0; i < real; ++i)
        memcpy(bytes + i * kMostPiece, some_codes(p, raw, row + kRows * tile + i, first, last, room), last - first);
      a.from = bytes;
      a.stride = kMostPiece;
    }
    *w_row = 64;
    *w_next = d.w_digits * kTile;
    const int64_t bits = direct ? p.bits : 8;
    switch (d.kind) {
      case kDirect:
        if (!direct || real == kRows) {
          *w_row = a.stride;
          *w_next = 64;
          return a.from;
        }
        for (int64_t step = 0; step < steps; ++step)
          for (int64_t i = 0; i < real; ++i)
            _mm512_store_si512(decoded + step * kTile + 64 * i, _mm512_loadu_si512(a.from + i * a.stride + 64 * step));
        break;
      case kPlain:
        bits == 8   ? decode_plain<8>(a, table)
        : bits == 4 ? decode_plain<4>(a, table)
        : bits == 2 ? decode_plain<2>(a, table)
                    : decode_plain<1>(a, table);
        break;
      case kScaled:
        bits == 8 ? scaled<8>(a) : bits == 4 ? scaled<4>(a) : bits == 2 ? scaled<2>(a) : scaled<1>(a);
        break;
      case kLookUp: odd[tile] |= decode_look_up(p, a, tables); break;
      default: odd[tile] |= decode_floats(p, a);
    }
    return decoded;
  }

  template <int kBits>
  void scaled(const Codes& a) const {
    const int64_t size = p.blocks <= 1 ? 64 : p.block_size;
    if (p.zero_point != nullptr)
      return size % 64 == 0 ? decode_scaled<kBits, 1, true>(a, values) : decode_scaled<kBits, 4, true>(a, values);
    size % 64 == 0   ? decode_scaled<kBits, 1, false>(a, values)
    : size % 32 == 0 ? decode_scaled<kBits, 2, false>(a, values)
                     : decode_scaled<kBits, 4, false>(a, values);
  }
};

void run(const Problem* problem, const Plan* plan, const void* memory, void* mine, int64_t unit) {
  const Problem& p = *problem;
  const Detail d = detail_of<Detail>(plan);
  const Room room(d);
  const char* shared = static_cast<const char*>(memory);
  char* own = static_cast<char*>(mine);
  const Extent e(p, d, unit);
  const int64_t batch = e.batch, first = e.first, count = e.count, panel = e.panel, panels = e.panels,
                tiles = div_up(count, kRows);
  Unit u(p, d, batch, first, count, shared, own);
  int32_t (*results)[256] = reinterpret_cast<int32_t (*)[256]>(own + room.results);
  float* sums = reinterpret_cast<float*>(own + room.sums);
  const auto head_at = [&](int64_t j, int64_t chunk) {
    return reinterpret_cast<const Head*>(shared + head_of(d, batch, panel + j, chunk));
  };
  bool ordinary[kUnitPanels];
  for (int64_t j = 0; j < panels; ++j) {
    ordinary[j] = true;
    for (int64_t chunk = 0; chunk < d.parts; ++chunk) ordinary[j] = ordinary[j] && head_at(j, chunk)->digits > 0;
  }
  configure(64, 1 << 4 | 1 << 5 | 1 << 6);
  Next next;
  Piece a;
  Pending pending;
  a.results = results;
  for (int64_t group = 0; group < tiles; group += d.together) {
    for (int64_t part = 0; part < d.parts; ++part) {
      const int64_t k = part * kSpan, end = min64(k + kSpan, p.k), size = piece_of(p, d);
      for (int64_t tile = group; tile < min64(group + d.together, tiles); ++tile) {
        u.in_blocks() ? u.fetch(tile, part) : u.fetch_rows(tile);
        if (d.together > 1) {
          next = u.lines_of(tile + 1, k, end, panels * kSteps);
        } else if (part == 0) {
          next = u.lines_of(tile + 1, 0, p.k, panels * d.parts * kSteps);
        }
        for (int64_t from = k; from < end; from += size) {
          const int64_t to = min64(from + size, end);
          a.w = u.decode(tile, from, to, k, &a.w_row, &a.w_next);
          a.steps = div_up(to - from, 64);
          // Results of one panel stay in tiles as long as their scales are the same.
          a.first = panels > 1 || from == k;
          a.last = panels > 1 || to == end;
          a.x = reinterpret_cast<const uint8_t*>(shared) + piece_at(p, d, batch, panel, from);
          for (int64_t j = 0; j < panels; ++j, a.x += a.steps * kMostDigits * kTile) {
            if (!ordinary[j]) continue;
            const Head* head = head_at(j, part);
            a.sums = panels > 1 ? head->pieces + (from - k) / size : &head->chunk;
            multiply_of(d.w_digits, head->digits)(p, a, next, pending);
            if (!a.last) continue;
            const int64_t m = kRows * (panel + j), n = kRows * tile;
            pending.done = 0;
            pending.results = a.results;
            pending.orders = last_order(static_cast<int>(head->digits)) + 1;
            pending.x_scale = head->scale;
            pending.x_sums = a.sums;
            _mm512_storeu_ps(pending.factor, _mm512_mul_ps(u.factor, _mm512_set1_ps(lowest_power(d.w_digits))));
            _mm512_storeu_si512(pending.zero, u.zero);
            pending.zeros = d.w_digits == 1 && p.zero_point != nullptr;
            pending.sums = sums + ((tile - group) * panels + j) * 256;
            pending.first = part == 0 && (panels == 1 || from == k);
            pending.last = to == p.k;
            pending.at = batch * p.y_batch + m * p.y_row + (first + n) * p.y_column;
            pending.rows = min64(kRows, count - n);
            pending.lanes = min64(kRows, p.m - m);
            a.results = a.results == results ? results + kMostDigits : results;
          }
        }
      }
    }
  }
  finish(p, pending);
  _tile_release();
  const auto odd = [&](int64_t n) { return (u.odd[n / kRows] >> n % kRows & 1) != 0; };
  for (int64_t j = 0; j < panels; ++j) multiply_rest(kMatmulAvx512Vbmi, p, e, j, ordinary[j], odd, own + room.spare);
}

}  // namespace

extern const MatmulKernel kMatmulAmx = {plan, prepare, run, takes, nullptr, &kMatmulAvx512Vbmi};
extern const Isa kIsaAmx = {"amx", &kMatmulFewAmx, &kDecodeAvx512Vbmi, &kInt8Amx};
