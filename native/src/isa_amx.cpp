// Floats on AMX. A tile of the weight has 16 rows of 32 codes, decoded to bfloat16 in the order in which they lie in
// memory; a tile of x, packed once per call, has the same codes of 16 of its rows.
//
// Floats are split into terms of bfloat16: three hold a float32, and one holds any value of a table of integers or of
// small floats. Products of terms that are both small are left out: three are multiplied, or six where the table needs
// three terms. Few rows of x, transposed products, and tables of floats with zero points are AVX-512's.
//
// Decoding hides behind multiplying: rows of the strip that comes next are decoded between the products of the one that
// is there. Results of a block are stored and scaled while those of the next are summed up, since a tile's last product
// takes long to end. Nothing is copied from where it was just written by smaller stores: such a copy waits for them.
#include "amx.h"
#include "avx512.h"
#include "int8.h"

namespace {

using F = __m512;
using I = __m512i;

constexpr int64_t kTile = 1024;         // bytes
constexpr int64_t kStrip = 32;          // rows of the weight that are decoded and multiplied at a time
constexpr int64_t kMostCodes = 128;     // of each of them, at most
constexpr int64_t kMostTiles = kMostCodes / 32;
constexpr int64_t kUnitRows = 512;      // of the weight in a unit, at most
constexpr int64_t kFewRows = 64;        // likewise where all of x stays in L2: they share what is in L1 of it
constexpr int64_t kUnitPanels = 16;     // of 16 rows of x in a unit, at most
constexpr int64_t kSlice = 32;          // tiles of x in a part of the preparation
constexpr int64_t kInL2 = 1 << 20;      // bytes of x that stay there beside all else
constexpr int64_t kTables = 2048;       // bytes of tables at the start of shared memory

// How codes become bfloat16.
enum Kind {
  kNone,             // they do not: nothing is decoded
  kSixteen,          // fewer than eight bits: through a table in a register
  kSixteenLessZero,  // through one of such tables for each zero point
  kWhole,            // integers of eight bits, less a zero point or what they are off
  kByte              // through a table of 256
};

struct Detail {
  int64_t rows, chunks;           // of the weight in a unit, and units that they make
  int64_t panels, row_blocks;     // of 16 rows of x, and how many units they make
  int64_t x_terms, w_terms, kind;
  int64_t slices;                 // parts of the preparation of a panel
  int64_t grain;                  // codes that are added up before they are scaled
  int64_t tiles;                  // of a panel and a term
  int64_t together;               // strips that meet a panel while it is in L1
};

//
// Terms
//

// The bfloat16 next to each float, in the upper half; what would round to infinity is cut, and NaN stays one.
EQQ_INLINE F next_bf16(F value) {
  const I bits = _mm512_castps_si512(value), low = _mm512_set1_epi32(0xffff), infinity = _mm512_set1_epi32(0x7f800000);
  const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const I near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 over = _mm512_cmpeq_epi32_mask(_mm512_and_si512(near, infinity), infinity);
  const I cut = _mm512_andnot_si512(low, _mm512_mask_mov_epi32(near, over, bits));
  return _mm512_mask_mov_ps(_mm512_castsi512_ps(cut), _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                            _mm512_set1_ps(__builtin_nanf("")));
}

// What a term leaves; nothing of what is not finite.
EQQ_INLINE F rest(F value, F term) {
  const I infinity = _mm512_set1_epi32(0x7f800000);
  const __mmask16 finite = _mm512_cmpneq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(value), infinity), infinity);
  return _mm512_maskz_sub_ps(finite, value, term);
}

// The terms of the values of a table, less a zero point, as halves. Returns how many are needed: one, two or three.
int64_t split_table(const Problem& p, float zero, uint16_t (*terms)[256]) {
  int64_t needed = 1;
  for (int i = 0; i < 1 << p.bits; i += 16) {
    const __mmask16 some = p.bits < 4 ? (1 << (1 << p.bits)) - 1 : 0xffff;
    F value = _mm512_maskz_sub_ps(some, _mm512_maskz_loadu_ps(some, p.table + i), _mm512_set1_ps(zero));
    for (int64_t t = 0; t < 3; ++t) {
      const F term = next_bf16(value);
      if (_mm512_cmp_ps_mask(term, _mm512_setzero_ps(), _CMP_NEQ_UQ) != 0) needed = max64(needed, t + 1);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(terms[t] + i), _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(term), 16)));
      value = rest(value, term);
    }
  }
  return needed;
}

// Whether all numbers are zero or between 2^-`range` and 2^`range`, of which these are the largest magnitudes, and the
// smallest, less one bit: so zero is none.
struct Magnitudes {
  I most = _mm512_setzero_si512(), least = _mm512_set1_epi32(-1);

  __attribute__((always_inline)) inline void see(F value) {
    const I magnitude = _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7fffffff));
    most = _mm512_max_epu32(most, magnitude);
    least = _mm512_min_epu32(least, _mm512_sub_epi32(magnitude, _mm512_set1_epi32(1)));
  }
  __attribute__((always_inline)) inline bool ordinary(int range) const {
    const I low = _mm512_set1_epi32(((127 - range) << 23) - 1), high = _mm512_set1_epi32((127 + range) << 23);
    return _mm512_cmpgt_epu32_mask(most, high) == 0 && _mm512_cmplt_epu32_mask(least, low) == 0;
  }
};

// Whether all values of a table are ordinary; NaN may be among them.
bool ordinary_table(const Problem& p) {
  Magnitudes all;
  for (int i = 0; i < 1 << p.bits; i += 16) {
    const __mmask16 some = p.bits < 4 ? (1 << (1 << p.bits)) - 1 : 0xffff;
    const F values = _mm512_maskz_loadu_ps(some, p.table + i);
    all.see(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(values, values, _CMP_ORD_Q), values));
  }
  return all.ordinary(32);
}

int64_t terms_of_table(const Problem& p) {
  uint16_t terms[3][256];
  return (p.bits == 8 && p.values == kValueInteger) || p.zero_point != nullptr ? 1 : split_table(p, 0, terms);
}

// Whether values less a zero point are integers that one term holds.
EQQ_INLINE bool small_integers(const Problem& p) {
  for (int i = 0; i < 1 << p.bits; ++i)
    if (!(p.table[i] >= -1 && p.table[i] <= 256) || p.table[i] != static_cast<float>(static_cast<int>(p.table[i]))) return false;
  return true;
}

//
// x
//

EQQ_INLINE const char* y_at(const Problem& p, int64_t at) { return static_cast<const char*>(p.y) + at * (p.x_type == kFloat32 ? 4 : 2); }

// Numbers `k` to `k + 15`, of which `real` are, of 16 rows from `at` on: a vector of rows for each number.
void square(const Problem& p, int64_t at, int64_t k, int64_t real, int64_t rows, F* out) {
  at += k * p.x_column;
  if (p.x_column == 1) {
    for (int64_t i = 0; i < 16; ++i) out[i] = load_some(p.x, p.x_type, at + (i < rows ? i : 0) * p.x_row, i < rows ? first_few(real) : 0);
    Avx512::transpose(out);
    return;
  }
  for (int64_t j = 0; j < 16; ++j) {
    const int64_t from = at + (j < real ? j : 0) * p.x_column;
    if (p.x_row == 1) {
      out[j] = load_some(p.x, p.x_type, from, j < real ? first_few(rows) : 0);
      continue;
    }
    float values[16] = {0};
    for (int64_t i = 0; i < (j < real ? rows : 0); ++i) _mm_store_ss(values + i, _mm512_castps512_ps128(load_some(p.x, p.x_type, from + i * p.x_row, 1)));
    out[j] = _mm512_loadu_ps(values);
  }
}

// The terms of two codes of 16 rows, side by side. Ties round away from zero: what is left is a bit less.
template <int kX>
EQQ_INLINE void pack_pair(F one, F two, uint8_t* out) {
  const I upper = _mm512_set1_epi32(static_cast<int>(0xffff0000)), half = _mm512_set1_epi32(0x8000);
#pragma GCC unroll 3
  for (int t = 0; t < kX; ++t) {
    const F a = _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(one), half), upper));
    const F b = _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(two), half), upper));
    _mm512_store_si512(out + t * kTile, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b)));
    one = _mm512_sub_ps(one, a);
    two = _mm512_sub_ps(two, b);
  }
}

// The terms of 16 rows of x: pairs of codes below each other, as tiles want them; tiles of terms one after the other.
// Returns whether all numbers are ordinary. Of others the terms may be wrong.
template <int kX>
bool pack(const Problem& p, const Runs& r, int64_t at, int64_t rows, int64_t first, int64_t last, uint8_t* out) {
  Magnitudes all;
  for (int64_t q = 32 * first; q < 32 * last; q += 16) {  // sixteen codes are never of two runs
    F values[16];
    const int64_t run = q / r.size, offset = q % r.size;
    const int64_t real = run < r.count ? run_length(r, p.k, run) - offset : 0;
    square(p, at, real > 0 ? run_start(r, run) + offset : 0, min64(real, 16), rows, values);
    uint8_t* to = out + q / 32 * kX * kTile + q % 32 * 32;
#pragma GCC unroll 8
    for (int j = 0; j < 16; j += 2) {
      all.see(values[j]);
      all.see(values[j + 1]);
      pack_pair<kX>(values[j], values[j + 1], to + 32 * j);
    }
  }
  return all.ordinary(64);
}

//
// The weight
//

// Codes that are decoded and multiplied at a time: what is decoded, twice, and x fit in L1.
constexpr int64_t codes_at_once(int64_t w_terms) { return w_terms == 1 ? kMostCodes : kMostCodes / 2; }

// What all rows have in common of these.
struct Range {
  int64_t first, tiles, pieces;    // the first code, how many tiles, and how many pieces have a scale of their own
  int64_t first_block, last_block;
  bool direct;                     // whether codes lie in memory as tiles want them
  int block[kMostCodes / 16];      // where the scales of a piece are
  int64_t place[kMostTiles], zero[kMostTiles];  // where the bytes of a tile are in a row, and its zero points
  int shift[kMostTiles];           // the bit from which on a byte holds its code
};

// Where those of a strip are.
struct Source {
  const uint8_t* codes;
  int64_t stride;         // bytes from one row to the next
  const int64_t* places;  // of tiles in a row
  const int* shifts;
  const uint8_t* zero;    // zero points, 16 bytes from one row to the next; or null
  const int64_t* zeros;   // where those of tiles are
};

// Rows of a strip that are decoded, all tiles of a row at once: a line of memory is read once, since the lines of many
// rows have room for few in L1. All by value: stores of bytes might change what is in memory.
template <int kW, Kind kKind>
struct Decoder {
  static constexpr int kTiles = static_cast<int>(codes_at_once(kW)) / 32;
  const uint8_t *codes, *zero, *tables;
  uint8_t* out;
  int64_t stride;
  int64_t place[kTiles], zeros[kTiles];
  I shift[kTiles];
  F lowest;

  EQQ_INLINE Decoder from(const Source& s, int64_t row, const uint8_t* tables, float lowest, uint8_t* out) {
    Decoder a;
    a.codes = s.codes + row * s.stride;
    a.zero = s.zero == nullptr ? nullptr : s.zero + 16 * row;
    a.tables = tables;
    a.out = out + row / 16 * kW * kTile + row % 16 * 64;
    a.stride = s.stride;
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
      a.place[t] = s.places[t];
      a.zeros[t] = s.zeros[t];
      a.shift[t] = _mm512_set1_epi16(static_cast<int16_t>(s.shifts[t]));
    }
    a.lowest = _mm512_set1_ps(lowest);
    return a;
  }

  EQQ_INLINE __m256i load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

  template <int kFirst, int kLast>
  __attribute__((always_inline)) inline void rows(const I* registers) const {
#pragma GCC unroll 16
    for (int i = kFirst; i < kLast; ++i) {
#pragma GCC unroll 4
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint8_t* row = codes + i * stride + place[tile];
        uint8_t* to = out + tile * 2 * kW * kTile + 64 * i;
        if constexpr (kKind == kSixteen || kKind == kSixteenLessZero) {
          // Bits above those of a code are not looked at.
          const I index = _mm512_srlv_epi16(_mm512_cvtepu8_epi16(load(row)), shift[tile]);
          if constexpr (kKind == kSixteenLessZero) {
            _mm512_store_si512(to, _mm512_permutexvar_epi16(index, _mm512_load_si512(tables + 64 * zero[zeros[tile] + 16 * i])));
          } else {
#pragma GCC unroll 3
            for (int t = 0; t < kW; ++t) _mm512_store_si512(to + kTile * t, _mm512_permutexvar_epi16(index, registers[t]));
          }
        } else if constexpr (kKind == kWhole) {
          const I some = _mm512_cvtepu8_epi16(load(row)), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
          const F off = zero == nullptr ? lowest : _mm512_sub_ps(lowest, _mm512_set1_ps(zero[zeros[tile] + 16 * i]));
          const F even = _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_andnot_si512(upper, some)), off);
          const F odd = _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(some, 16)), off);
          _mm512_store_si512(to, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                                 _mm512_and_si512(_mm512_castps_si512(odd), upper)));
        } else if (kKind == kByte && i % 2 == 0) {
          // Eight codes of one row and eight of the next in each quarter: interleaving brings each row to its order.
          const I order = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
          const I both = _mm512_permutex2var_epi64(_mm512_castsi256_si512(load(row)), order, _mm512_castsi256_si512(load(row + stride)));
          const __mmask64 upper = _mm512_movepi8_mask(both);
#pragma GCC unroll 3
          for (int t = 0; t < kW; ++t) {
            const I low = look_up(both, upper, tables + 512 * t), high = look_up(both, upper, tables + 512 * t + 256);
            _mm512_store_si512(to + kTile * t, _mm512_unpacklo_epi8(low, high));
            _mm512_store_si512(to + kTile * t + 64, _mm512_unpackhi_epi8(low, high));
          }
        }
      }
    }
  }

  EQQ_INLINE I look_up(I codes, __mmask64 upper, const uint8_t* table) {
    const I low = _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
    const I high = _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), codes, _mm512_load_si512(table + 192));
    return _mm512_mask_blend_epi8(upper, low, high);
  }
};

//
// Products
//

// Results that are to be scaled and added, once they are stored.
struct Pending {
  int turn;            // which of the two pairs of tiles has them
  const float* scale;  // of the rows of a strip, 16 floats apart
  float* sums;
  float (*results)[512];
};

// Some codes of a strip times a panel of x.
struct Work {
  const uint8_t *w, *x;
  int64_t pieces, grain;  // of codes that share a scale, and how many these are
  const float* scale;
  const int* block;       // where the scales of a piece are
  float* sums;
  const Source* next;     // is decoded meanwhile
  uint8_t* out;           // to here
  const uint8_t* tables;
  float lowest;
};

template <int kResult, int kX>
EQQ_INLINE void multiply() {
#define EQQ_MULTIPLY(RESULT)                                              \
  if constexpr (kResult == RESULT && kX == 0) _tile_dpbf16ps(RESULT, 7, 4); \
  if constexpr (kResult == RESULT && kX == 1) _tile_dpbf16ps(RESULT, 7, 5); \
  if constexpr (kResult == RESULT && kX == 2) _tile_dpbf16ps(RESULT, 7, 6);
  EQQ_MULTIPLY(0)
  EQQ_MULTIPLY(1)
  EQQ_MULTIPLY(2)
  EQQ_MULTIPLY(3)
#undef EQQ_MULTIPLY
}

EQQ_INLINE void add_results(const Pending& a) {
  const float *results = a.results[a.turn], *scale = a.scale;
  float* sums = a.sums;
  settle(results);
#pragma GCC unroll 32
  for (int i = 0; i < kStrip; ++i)
    _mm512_store_ps(sums + 16 * i, _mm512_fmadd_ps(_mm512_load_ps(results + 16 * i), _mm512_set1_ps(scale[16 * i]), _mm512_load_ps(sums + 16 * i)));
}

// Terms of the weight and of x whose products count: those with the sum of their orders at most this.
template <int kW, int kX>
constexpr int most_order() {
  return (kW > kX ? kW : kX) - 1;
}
template <int kW, int kX>
constexpr int count_products() {
  int count = 0;
  for (int i = 0; i < kW; ++i)
    for (int j = 0; j < kX; ++j) count += i + j <= most_order<kW, kX>();
  return count;
}

// The last term of x that term `i` of the weight meets.
template <int kW, int kX>
constexpr int last_x(int i) {
  return kX - 1 < most_order<kW, kX>() - i ? kX - 1 : most_order<kW, kX>() - i;
}

// The products of both tiles of a strip, from terms `kI` and `kJ` of tile `kHalf` on: small ones first, which rounds
// less. Some rows are decoded after each.
template <int kW, int kX, Kind kKind, int kTurn, int kHalf, int kI, int kJ, int kDone>
EQQ_INLINE void products(const uint8_t* w, Decoder<kW, kKind> decoder, const I* registers) {
  if constexpr (kI < 0) {
    if constexpr (kHalf == 0) products<kW, kX, kKind, kTurn, 1, kW - 1, last_x<kW, kX>(kW - 1), kDone>(w, decoder, registers);
  } else if constexpr (kJ < 0) {
    products<kW, kX, kKind, kTurn, kHalf, kI - 1, last_x<kW, kX>(kI - 1), kDone>(w, decoder, registers);
  } else {
    constexpr int kAll = 2 * count_products<kW, kX>(), kRows = kStrip / Decoder<kW, kKind>::kTiles / 2;
    if constexpr (kJ == last_x<kW, kX>(kI)) _tile_loadd(7, w + (kHalf * kW + kI) * kTile, 64);
    multiply<2 * kTurn + kHalf, kJ>();
    if constexpr (kKind != kNone) decoder.template rows<kRows * kDone / kAll * 2, kRows*(kDone + 1) / kAll * 2>(registers);
    products<kW, kX, kKind, kTurn, kHalf, kI, kJ - 1, kDone + 1>(w, decoder, registers);
  }
}

template <int kW, Kind kKind>
EQQ_INLINE void load_tables(const uint8_t* tables, I* registers) {
  if constexpr (kKind == kSixteen) {
#pragma GCC unroll 3
    for (int t = 0; t < kW; ++t) registers[t] = _mm512_load_si512(tables + 64 * t);
  }
}

// Codes that share a scale. The results before are stored once there is something to do meanwhile.
template <int kW, int kX, Kind kKind, int kTurn>
EQQ_INLINE void piece(const Work& a, int64_t index, Pending& last) {
  I registers[3];
  load_tables<kW, kKind>(a.tables, registers);
  const int64_t first = index * a.grain / 32, end = max64((index + 1) * a.grain / 32, first + 1);
  const int64_t half = a.grain == 16 ? index % 2 : 0;
  const uint8_t *w = a.w + first * 2 * kW * kTile + 32 * half, *x = a.x + first * kX * kTile + 512 * half;
  clear_results<kTurn>();
  for (int64_t tile = first; tile < end; ++tile, w += 2 * kW * kTile, x += kX * kTile) {
    settle(w);
    _tile_loadd(4, x, 64);
    if constexpr (kX > 1) _tile_loadd(5, x + kTile, 64);
    if constexpr (kX > 2) _tile_loadd(6, x + 2 * kTile, 64);
    Decoder<kW, kKind> decoder;
    if constexpr (kKind != kNone) decoder = decoder.from(*a.next, kStrip / decoder.kTiles * tile, a.tables, a.lowest, a.out);
    products<kW, kX, kKind, kTurn, 0, kW - 1, last_x<kW, kX>(kW - 1), 0>(w, decoder, registers);
    if (tile == first) store_results<1 - kTurn>(last.results);
  }
  add_results(last);
  last.turn = kTurn;
  last.scale = a.scale + a.block[index];
  last.sums = a.sums;
}

template <int kW, int kX, Kind kKind>
void multiply_range(const Work& a, Pending& last) {
  for (int64_t i = 0; i < a.pieces; ++i) {
    if (last.turn == 0) {
      piece<kW, kX, kKind, 1>(a, i, last);
    } else {
      piece<kW, kX, kKind, 0>(a, i, last);
    }
  }
}

template <int kW, Kind kKind>
void decode_range(const Work& a) {
  I registers[3];
  load_tables<kW, kKind>(a.tables, registers);
  for (int64_t row = 0; row < kStrip; row += 16)
    Decoder<kW, kKind>::from(*a.next, row, a.tables, a.lowest, a.out).template rows<0, 16>(registers);
}

// Which functions a problem takes: with decoding meanwhile, without, and decoding alone.
struct Functions {
  void (*both)(const Work&, Pending&);
  void (*multiply)(const Work&, Pending&);
  void (*decode)(const Work&);
};

template <int kW, int kX, Kind kKind>
constexpr Functions functions() {
  return {multiply_range<kW, kX, kKind>, multiply_range<kW, kX, kNone>, decode_range<kW, kKind>};
}

template <int kW, int kX>
Functions functions_of(int64_t kind) {
  if constexpr (kW == 1) {
    if (kind == kSixteenLessZero) return functions<1, kX, kSixteenLessZero>();
    if (kind == kWhole) return functions<1, kX, kWhole>();
  }
  return kind == kSixteen ? functions<kW, kX, kSixteen>() : functions<kW, kX, kByte>();
}

Functions functions_of(const Detail& d) {
  switch (10 * d.w_terms + d.x_terms) {
    case 33: return functions_of<3, 3>(d.kind);
    case 13: return functions_of<1, 3>(d.kind);
    case 22: return functions_of<2, 2>(d.kind);
    case 12: return functions_of<1, 2>(d.kind);
    case 21: return functions_of<2, 1>(d.kind);
    default: return functions_of<1, 1>(d.kind);
  }
}

//
// Problems
//

// Whether tiles can multiply it, and do so faster: their time is that of 16 rows of x, however few there are.
//
// They take subnormal numbers for zero, and the last term of a small number is one. An infinity times a term that is zero
// is NaN. Sums that are not scaled yet may overflow. So what is very small or large is left to AVX-512: of x, once that
// is seen.
bool takes(const Problem* problem) {
  const Problem& p = *problem;
  if (p.transpose || p.k <= 0) return false;
  const bool halves = runs_of(p).size < 32;  // of tiles
  if (p.zero_point != nullptr && (halves || (p.bits == 8 && p.values != kValueInteger) || !small_integers(p))) return false;
  return p.m >= (halves || terms_of_table(p) > 1 ? 8 : 3) && ordinary_table(p);
}

// The memory of a thread.
struct Room {
  int64_t decoded, bytes, unpacked, results, scales, zeros, sums, all;

  explicit Room(const Detail& d) {
    const int64_t strips = d.rows / kStrip, codes = codes_at_once(d.w_terms);
    // Rows of a group, and those of the next; not a multiple of a page apart.
    decoded = d.together * codes / 32 * 2 * d.w_terms * kTile + 512;
    bytes = 2 * decoded;
    unpacked = bytes + kStrip * codes;
    results = unpacked + round_up(kStepRoom, 64);
    scales = results + 8 * kTile;  // and as much again, for what is before the first
    zeros = scales + strips * 4 * kTile;
    sums = zeros + strips * kTile;
    all = sums + strips * min64(d.panels, kUnitPanels) * 2 * kTile;
  }
};

// Behind packed x there is a byte for each part of the preparation: whether its numbers are ordinary.
EQQ_INLINE int64_t flags_at(const Plan* plan) { return plan->shared_bytes - round_up(plan->parts, 64); }

void plan(const Problem* problem, int64_t threads, Plan* out) {
  const Problem& p = *problem;
  Detail d;
  const bool exact = p.precision == kExact && p.x_type == kFloat32, whole = p.bits == 8 && p.values == kValueInteger;
  d.kind = whole ? kWhole : p.bits == 8 ? kByte : p.zero_point != nullptr ? kSixteenLessZero : kSixteen;
  d.w_terms = terms_of_table(p);
  // Two terms have the 11 bits of a float16, and are far more exact than a result of 16 bits.
  d.x_terms = p.x_type == kBFloat16 ? 1 : exact ? 3 : 2;
  d.w_terms = !exact ? min64(d.w_terms, 2) : d.w_terms > 1 ? 3 : 1;
  const Runs r = runs_of(p);
  const int64_t codes = codes_at_once(d.w_terms);
  d.grain = r.size % codes == 0 ? codes : min64(r.size, 64);
  d.panels = div_up(p.m, 16);
  d.row_blocks = div_up(d.panels, kUnitPanels);
  const int64_t most = min64(d.panels, kUnitPanels) * d.x_terms * 32 * r.padded > kInL2 ? kUnitRows : kFewRows;
  int64_t rows = div_up(p.n * p.batch * d.row_blocks, 4 * threads);
  rows = max64(rows, (int64_t{1} << 18) / max64(p.m * p.k, 1));
  d.rows = max64(min64(round_up(min64(rows, p.n), kStrip), most), kStrip);
  d.chunks = div_up(p.n, d.rows);
  d.tiles = div_up(r.padded, 32);
  d.slices = div_up(d.tiles, kSlice);
  d.together = d.panels <= 2 ? 1 : min64(d.rows / kStrip, 2);
  out->parts = p.batch * d.panels * d.slices;
  out->shared_bytes = kTables + p.batch * d.panels * d.tiles * d.x_terms * kTile + round_up(out->parts, 64);
  out->units = p.batch * d.row_blocks * d.chunks;
  out->own_bytes = Room(d).all;
  // So few rows at a time that packed x stays in the cache, yet units for all threads.
  out->rows = 16 * kUnitPanels * div_up(4 * threads, p.batch * d.chunks);
  static_assert(sizeof d <= sizeof out->detail, "a detail too much");
  memcpy(out->detail, &d, sizeof d);
}

void fill_tables(const Problem& p, const Detail& d, uint8_t* tables) {
  uint16_t terms[3][256];
  if (d.kind == kWhole) return;
  for (int zero = 0; zero < (d.kind == kSixteenLessZero ? 1 << p.bits : 1); ++zero) {
    split_table(p, static_cast<float>(zero), terms);
    for (int64_t t = 0; t < d.w_terms; ++t) {
      if (d.kind == kByte) {
        for (int i = 0; i < 256; ++i) {
          tables[512 * t + i] = static_cast<uint8_t>(terms[t][i]);
          tables[512 * t + 256 + i] = static_cast<uint8_t>(terms[t][i] >> 8);
        }
      } else {
        uint16_t* table = reinterpret_cast<uint16_t*>(tables) + 32 * (zero + t);
        for (int i = 0; i < 32; ++i) table[i] = terms[t][i & ((1 << p.bits) - 1)];
      }
    }
  }
}

void prepare(const Problem* problem, const Plan* plan, void* memory, int64_t part) {
  const Problem& p = *problem;
  const Runs r = runs_of(p);
  Detail d;
  memcpy(&d, plan->detail, sizeof d);
  uint8_t* shared = static_cast<uint8_t*>(memory);
  if (part == 0) fill_tables(p, d, shared);
  const int64_t slice = part % d.slices, panel = part / d.slices % d.panels, batch = part / d.slices / d.panels;
  const auto pack_terms = d.x_terms == 3 ? pack<3> : d.x_terms == 2 ? pack<2> : pack<1>;
  uint8_t* x = shared + kTables + (batch * d.panels + panel) * d.tiles * d.x_terms * kTile;
  shared[flags_at(plan) + part] =
      pack_terms(p, r, batch * p.x_batch + 16 * panel * p.x_row, min64(16, p.m - 16 * panel), slice * kSlice,
                 min64((slice + 1) * kSlice, d.tiles), x);
}

bool suits(const Problem*, const Plan* plan, const void* memory) {
  const uint8_t* flags = static_cast<const uint8_t*>(memory) + flags_at(plan);
  for (int64_t part = 0; part < plan->parts; ++part)
    if (!flags[part]) return false;
  return true;
}

// Some rows of the weight that a thread multiplies, a strip at a time.
struct Unit {
  const Problem& p;
  const Detail& d;
  Runs r;
  int64_t row, count;  // the first, and how many
  uint8_t filler;      // a code with a finite value, for what is no code
  uint8_t *bytes, *room;
  float* scales;       // of the rows of a strip: those of two groups of 16 blocks
  uint8_t* zeros;
  int64_t groups[kUnitRows / kStrip][2];  // which these are

  // The scales and zero points of a block of a strip, and of 15 others.
  void fetch(int64_t strip, int64_t block) {
    const int64_t group = block / 16, slot = group & 1;
    if (groups[strip][slot] == group) return;
    groups[strip][slot] = group;
    const int64_t first = 16 * group, end = min64(first + 16, p.blocks);
    const int64_t size = p.scale_kind == kScaleFloat32 ? 4 : p.scale_kind <= kScaleBFloat16 ? 2 : 1;
    float* out = scales + (2 * strip + slot) * 512;
    for (int64_t i = 0; i < kStrip; ++i, out += 16) {
      const int64_t at = row + min64(kStrip * strip + i, count - 1);
      if (end == first + 16) {
        const uint8_t* bits = static_cast<const uint8_t*>(p.scale) + (at * p.blocks + first) * size;
        F values = Kernels<Avx512>::some_scales(p.scale_kind, bits);
        if (p.row_scale != nullptr) values = _mm512_mul_ps(values, _mm512_set1_ps(p.row_scale[at]));
        _mm512_store_ps(out, values);
      } else {
        decode_scales_avx512(&p, at, first, end, out);
      }
      if (p.zero_point != nullptr) unpack_zero_points(p, at, first, end, zeros + (2 * strip + slot) * 512 + 16 * i);
    }
  }

  // What all rows have in common of a range.
  Range range_of(int64_t index) const {
    Range a;
    const int64_t codes = codes_at_once(d.w_terms), first = index * codes, end = min64(first + codes, r.padded);
    // Of a power of two codes: dividing takes long.
    const int64_t segment = p.bits == 8 ? 64 : p.bits == 4 ? 128 : p.bits == 2 ? 256 : 512, whole = p.bits == 8 ? p.k : p.k & -segment;
    const int64_t within = p.bits == 8 ? 0 : first & (segment - 1), block_codes = r.size * r.per_block;
    a.first = first;
    a.tiles = codes / 32;
    a.direct = r.size == r.real && first + codes <= whole;
    a.first_block = first / block_codes;
    a.pieces = 0;
    int64_t block = a.first_block, next = (block + 1) * block_codes;
    for (int64_t code = first; code < end; code += d.grain) {
      if (code == next) {
        ++block;
        next += block_codes;
      }
      const int64_t slot = 512 * (block / 16 & 1);
      a.block[a.pieces++] = static_cast<int>(slot + block % 16);
      for (int64_t tile = (code - first) / 32; tile < a.tiles; ++tile) a.zero[tile] = slot + block % 16;
    }
    a.last_block = block;
    for (int64_t tile = 0; tile < a.tiles; ++tile) {
      a.place[tile] = p.bits == 8 ? first + 32 * tile : (first - within) * p.bits / 8 + tile % 2 * 32;
      a.shift[tile] = p.bits == 8 ? 0 : static_cast<int>(within / kSegment + tile / 2) * p.bits;
    }
    return a;
  }

  // Where the codes of a range of a strip are; what does not lie in memory as tiles want it is copied.
  void find(int64_t strip, const Range& a, Source& s) {
    fetch(strip, a.first_block);
    fetch(strip, a.last_block);
    const int64_t at = row + kStrip * strip, real = min64(count - kStrip * strip, kStrip), codes = 32 * a.tiles;
    s.zero = p.zero_point == nullptr ? nullptr : zeros + 1024 * strip;
    s.zeros = a.zero;
    if (a.direct && real == kStrip) {
      s.codes = p.codes + at * p.words;
      s.stride = p.words;
      s.places = a.place;
      s.shifts = a.shift;
      const uint8_t* ahead = s.codes + a.place[0] + kSegment;
      for (int64_t i = 0; i < kStrip; ++i) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead + i * p.words), _MM_HINT_T1);
        if (p.bits == 8 && codes > 64) _mm_prefetch(reinterpret_cast<const char*>(ahead + kSegment + i * p.words), _MM_HINT_T1);
      }
      return;
    }
    static const int64_t places[kMostTiles] = {0, 32, 64, 96};
    static const int nothing[kMostTiles] = {0};
    const Integers raw = {};
    memset(bytes, filler, kStrip * codes);
    for (int64_t i = 0; i < real; ++i)
      for (int64_t code = a.first; code < min64(a.first + codes, r.padded); code += 16) {
        const int64_t run = code / r.size, offset = code % r.size, from = run_start(r, run) + offset;
        const int64_t some = min64(run_length(r, p.k, run) - offset, 16);
        if (some > 0) memcpy(bytes + i * codes + code - a.first, some_codes(p, raw, at + i, from, from + some, room), some);
      }
    s.codes = bytes;
    s.stride = codes;
    s.places = places;
    s.shifts = nothing;
  }
};

// Results of 16 rows of the weight and 16 of x.
void write_square(const Problem& p, int64_t at, int64_t rows, int64_t lanes, const float* sums) {
  if (p.y_column != 1 && p.y_row == 1) {
    for (int64_t i = 0; i < rows; ++i) store_some(p, at + i * p.y_column, _mm512_load_ps(sums + 16 * i), first_few(lanes));
    return;
  }
  F square[16];
  for (int64_t i = 0; i < 16; ++i) square[i] = _mm512_load_ps(sums + 16 * i);
  Avx512::transpose(square);
  for (int64_t m = 0; m < lanes; ++m) {
    if (p.y_column == 1) {
      store_some(p, at + m * p.y_row, square[m], first_few(rows));
    } else {
      for (int64_t i = 0; i < rows; ++i)
        store_some(p, at + m * p.y_row + i * p.y_column, _mm512_set1_ps(sums[16 * i + m]), 1);
    }
  }
}

void run(const Problem* problem, const Plan* plan, const void* memory, void* mine, int64_t unit) {
  const Problem& p = *problem;
  Detail d;
  memcpy(&d, plan->detail, sizeof d);
  const Room room(d);
  const uint8_t* shared = static_cast<const uint8_t*>(memory);
  uint8_t* own = static_cast<uint8_t*>(mine);
  const int64_t chunk = unit % d.chunks, block = unit / d.chunks % d.row_blocks, batch = unit / d.chunks / d.row_blocks;
  const int64_t first = chunk * d.rows, count = min64(d.rows, p.n - first), strips = div_up(count, kStrip);
  const int64_t panel = block * kUnitPanels, panels = min64(kUnitPanels, d.panels - panel), lanes = min64(16 * panels, p.m - 16 * panel);
  const int64_t base = batch * p.y_batch + 16 * panel * p.y_row + first * p.y_column;
  const auto floats = [&](int64_t at) { return reinterpret_cast<float*>(own + at); };
  float(*results)[512] = reinterpret_cast<float(*)[512]>(own + room.results);
  float* sums = floats(room.sums);
  Unit u = {p, d, runs_of(p), first_row(&p, batch) + first, count, 0, own + room.bytes, own + room.unpacked,
            floats(room.scales), own + room.zeros, {}};
  while (d.kind != kWhole && u.filler + 1 < 1 << p.bits && !(p.table[u.filler] - p.table[u.filler] == 0)) ++u.filler;
  memset(u.groups, 0xff, sizeof u.groups);
  memset(sums, 0, strips * panels * 2 * kTile);
  memset(results, 0, 8 * kTile);
  const Functions f = functions_of(d);
  const int64_t codes = codes_at_once(d.w_terms), ranges = div_up(u.r.padded, codes);
  const int64_t step = codes / 32 * d.x_terms * kTile, tiles = codes / 32 * 2 * d.w_terms * kTile;
  const uint8_t* x = shared + kTables + (batch * d.panels + panel) * d.tiles * d.x_terms * kTile;
  configure(2 * min64(d.grain, 32), 1 << 7);
  // What is pending before the first piece adds zeros to where nobody looks.
  Pending last = {1, results[2], results[3], results};
  Source next;
  Work a;
  a.next = &next;
  a.tables = shared;
  a.lowest = p.table[0];
  a.grain = d.grain;
  // Strips are decoded in groups: one while the one before is multiplied.
  Range now = u.range_of(0), then = now;
  const int64_t together = d.together, groups = div_up(strips, together);
  const auto size_of = [&](int64_t group) { return min64(together, strips - group * together); };
  for (int64_t i = 0; i < size_of(0); ++i) {
    u.find(i, now, next);
    a.out = own + i * tiles;
    f.decode(a);
  }
  // Results are written far apart, and fetched meanwhile.
  for (int64_t m = 0; p.y_column == 1 && m < lanes; ++m)
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(y_at(p, base + m * p.y_row + i), 1);
  int64_t turn = 0;
  for (int64_t range = 0; range < ranges; ++range, now = then) {
    if (range + 1 < ranges) then = u.range_of(range + 1);
    a.pieces = now.pieces;
    a.block = now.block;
    const bool meanwhile = d.grain > 16 && now.pieces * d.grain == codes;  // rows are decoded with each tile
    for (int64_t group = 0; group < groups; ++group, turn ^= 1) {
      const bool same = group + 1 < groups, more = same || range + 1 < ranges;
      const int64_t after = same ? group + 1 : 0;
      const auto decode = [&](int64_t i) {
        u.find(after * together + i, same ? now : then, next);
        a.out = own + (turn ^ 1) * room.decoded + i * tiles;
      };
      for (int64_t j = 0; j < panels; ++j) {
        a.x = x + j * d.tiles * d.x_terms * kTile + range * step;
        for (int64_t i = 0; i < size_of(group); ++i) {
          const int64_t strip = group * together + i;
          a.w = own + turn * room.decoded + i * tiles;
          a.scale = u.scales + 1024 * strip;
          a.sums = sums + (strip * panels + j) * 512;
          if (j == 0 && more && meanwhile && i < size_of(after)) {
            decode(i);
            f.both(a, last);
          } else {
            f.multiply(a, last);
          }
        }
      }
      // What could not be decoded meanwhile.
      for (int64_t i = meanwhile ? size_of(group) : 0; more && i < size_of(after); ++i) {
        decode(i);
        f.decode(a);
      }
    }
  }
  last.turn == 0 ? store_results<0>(results) : store_results<1>(results);
  add_results(last);
  _tile_release();
  for (int64_t i = 0; i < count; i += 16)
    for (int64_t m = 0; m < lanes; m += 16)
      write_square(p, base + m * p.y_row + i * p.y_column, min64(16, count - i), min64(16, lanes - m),
                   sums + (i / kStrip * panels + m / 16) * 512 + i % kStrip * 16);
}

}  // namespace

extern const MatmulKernel kMatmulAmx = {plan, prepare, run, takes, suits, &kMatmulAvx512Vbmi};
extern const Isa kIsaAmx = {"amx", &kMatmulFewAmx, &kDecodeAvx512Vbmi, &kInt8Amx};
