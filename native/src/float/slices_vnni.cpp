// Floats times small integers on AVX-512 with VNNI.
//
// Numbers of x become integers of 24 bits, whose bytes, called slices, are multiplied by the codes of the weight
// (`slice_panels.h`). Three such products take less time than one of floats, and codes need no conversion to floats.
// Sums are exact within a block, and are scaled at its end. AVX-512 kernels multiply very short blocks, few rows of x
// (panels would be mostly empty), transposed products, and other tables.
//
// Codes are unsigned: values minus the lowest value. Sums start with the correction.
#include "float/slice_panels.h"

namespace {

constexpr int64_t kPiece = 256;      // codes of a row that are decoded and multiplied at a time: they stay in L1
constexpr int64_t kMostPiece = 512;  // a segment of single bits
constexpr int64_t kLater = 2;        // pieces from a prefetch to its use
constexpr int64_t kUnitRows = 48;    // the most rows of the weight in a unit: whole tiles of any number of slices
constexpr int64_t kFewest = 12;      // the fewest rows of x that are worth a panel; with short blocks more:
constexpr int64_t kFewestOfMany = 25;
constexpr int64_t kShortest = 32;  // block
constexpr int64_t kMany = 256;     // rows of x, from which on packing them takes what products save, unless there are
constexpr int64_t kTall = 2048;    // rows of the weight that are many
constexpr int64_t kMostRuns = kMostPiece / kShortest + 2;
constexpr int64_t kScaleRoom = kSpan / kShortest + 24;  // scales of a row in a span
constexpr float kRangeOfScales = 0x1p64f;  // ordinary magnitudes are at most this, and at least its reciprocal

// Rows of the weight in a tile: twenty-four sums and a few more vectors fit in registers.
constexpr int tile_rows(int slices) { return 24 / slices; }

// Codes of a piece that share a scale: groups of four, and their block, relative to the first one of the span.
struct Run {
  int32_t groups, block;
};

// The part of a piece that is the same for all rows of the weight.
struct Place {
  int64_t first, blocks;  // the first block of the span, and the number of blocks
  int64_t count;          // the number of runs
  Run runs[kMostRuns];
};

// A piece of a panel.
struct alignas(64) Head {
  int32_t start[kMostRuns][kMostSlices][16];  // sums of slices, times the lowest value, if there are no zero points
  float scale[16];                            // the scale of the span
  int64_t slices;                             // its number of slices, or 0 if it cannot be sliced
};

struct Detail {
  int64_t rows, chunks;        // rows of the weight in a unit, and units along the weight
  int64_t panels, row_blocks;  // panels of x, and units along x
  int64_t piece;               // codes of a piece: whole segments
  int64_t pieces, spans;       // pieces and spans of a row of codes
  int64_t heads, x;            // their offsets into shared memory
  int64_t spare;               // bytes for the parts that AVX-512 kernels multiply
  int64_t factor;              // the factor that makes the table integers
};

EQQ_INLINE int64_t pieces_of_span(const Detail& d) { return kSpan / d.piece; }

// Bytes from one decoded row to the next: powers of two would share sets of L1.
EQQ_INLINE int64_t row_room(const Detail& d) { return d.piece + 64; }

EQQ_INLINE int64_t head_of(const Detail& d, int64_t batch, int64_t panel, int64_t piece) {
  return d.heads + ((batch * d.panels + panel) * d.pieces + piece) * static_cast<int64_t>(sizeof(Head));
}
EQQ_INLINE int64_t x_of(const Detail& d, int64_t batch, int64_t panel, int64_t piece) {
  return d.x + ((batch * d.panels + panel) * d.pieces + piece) * 16 * d.piece * kMostSlices;
}

bool accepts(const Problem* problem) {
  const Problem& p = *problem;
  if (p.transpose || p.k <= 0 || p.m < kFewest || (p.m > kMany && p.n < kTall) || integer_factor(p) == 0) return false;
  return p.blocks <= 1 ||
         (p.block_size >= (p.m < kFewestOfMany && !p.coarse ? 2 * kShortest : kShortest) && p.block_size % 16 == 0);
}

// Offsets into the scratch memory of a thread, behind decoded rows.
struct Room {
  int64_t raw, scales, zeros, sums, totals, spare, all;

  explicit Room(const Detail& d) {
    raw = d.rows * row_room(d);
    scales = raw + round_up(kStepRoom, 64);
    zeros = scales + 4 * d.rows * kScaleRoom;
    sums = zeros + 4 * d.rows * kScaleRoom;
    totals = sums + 64 * d.rows * min64(d.panels, kUnitPanels);
    spare = totals + 64 * d.rows * min64(d.panels, kUnitPanels);
    all = spare + d.spare;
  }
};

void plan(const Problem* problem, int64_t threads, Plan* out) {
  const Problem& p = *problem;
  Detail d;
  d.factor = integer_factor(p);
  d.panels = div_up(p.m, kRows);
  d.row_blocks = div_up(d.panels, kUnitPanels);
  d.piece = max64(kPiece, 512 / p.bits);
  d.pieces = div_up(p.k, d.piece);
  d.spans = div_up(p.k, kSpan);
  int64_t rows = div_up(p.n * p.batch * d.row_blocks, 4 * threads);
  rows = max64(rows, (int64_t{1} << 18) / (p.m * p.k));
  d.rows = min64(round_up(min64(rows, p.n), 24), kUnitRows);
  d.chunks = div_up(p.n, d.rows);
  d.heads = d.pieces * static_cast<int64_t>(round_up(sizeof(Place), 64));
  d.x = head_of(d, p.batch, 0, 0);
  d.spare = spare_of(avx512::kMatmul, p, d.rows);
  out->parts = p.batch * d.panels * d.spans;
  out->shared_bytes = x_of(d, p.batch, 0, 0);
  out->units = p.batch * d.row_blocks * d.chunks;
  out->own_bytes = round_up(Room(d).all, 64);
  // Few rows at a time, so that packed x stays in the cache, but enough units for all threads.
  out->rows = kRows * kUnitPanels * div_up(4 * threads, p.batch * d.chunks);
  set_detail(d, out);
}

//
// x
//

Place place_of(const Problem& p, const Detail& d, int64_t piece) {
  Place a;
  const int64_t size = p.blocks <= 1 ? p.k : p.block_size, begin = piece * d.piece, end = min64(begin + d.piece, p.k);
  const int64_t span = begin / kSpan * kSpan;
  a.first = span / size;
  a.blocks = (min64(span + kSpan, p.k) - 1) / size + 1 - a.first;
  a.count = 0;
  for (int64_t k = begin; k < end; ++a.count) {
    const int64_t next = min64((k / size + 1) * size, end);
    a.runs[a.count] = {static_cast<int32_t>(div_up(next - k, 4)), static_cast<int32_t>(k / size - a.first)};
    k = next;
  }
  return a;
}

template <int kX>
bool pack(const Problem& p, const Detail& d, int64_t batch, int64_t panel, const Span& span, char* shared) {
  const int64_t first = span.first / d.piece, last = min64(first + pieces_of_span(d), d.pieces);
  const I lowest = _mm512_set1_epi32(p.zero_point == nullptr ? lowest_integer(p, d.factor) : 1);
  Place places[kSpan / kPiece];
  for (int64_t i = 0; i < last - first; ++i) places[i] = place_of(p, d, first + i);
  const auto head = [&](int64_t piece) { return reinterpret_cast<Head*>(shared + head_of(d, batch, panel, piece)); };
  const auto where = [&](int64_t k) {
    uint8_t* to = reinterpret_cast<uint8_t*>(shared) + x_of(d, batch, panel, first + k / d.piece);
    return Slices{to + k % d.piece / 4 * 64 * kX, 64 * kX, 64};
  };
  int64_t run = 0, groups = 0;  // the run that is being packed, and its groups so far
  const auto keep = [&](int64_t end, const I* sums) {
    const int64_t piece = first + (end - 1) / d.piece;
    groups += 4;
    const Place& a = places[piece - first];
    if (run == a.count || groups < a.runs[run].groups) return false;  // the end is padded
    for (int i = 0; i < kX; ++i) _mm512_store_si512(head(piece)->start[run][i], _mm512_mullo_epi32(sums[i], lowest));
    groups = 0;
    run = end % d.piece == 0 ? 0 : run + 1;
    return true;
  };
  alignas(64) float scale[16];
  const bool enough = pack_slices<kX>(p, span, scale, where, keep);
  for (int64_t piece = first; piece < last; ++piece) memcpy(head(piece)->scale, scale, sizeof scale);
  return enough;
}

void prepare(const Problem* problem, const Plan* plan, void* memory, int64_t part) {
  const Problem& p = *problem;
  const Detail d = detail_of<Detail>(plan);
  char* shared = static_cast<char*>(memory);
  const int64_t at = part % d.spans, panel = part / d.spans % d.panels, batch = part / d.spans / d.panels;
  const int64_t first = at * pieces_of_span(d), last = min64(first + pieces_of_span(d), d.pieces);
  for (int64_t piece = first; batch == 0 && panel == 0 && piece < last; ++piece)
    reinterpret_cast<Place*>(shared)[piece] = place_of(p, d, piece);
  const Span span(p, batch, panel, at * kSpan);
  const int64_t slices = pack_fewest(p, span, p.k < kShort,
                                     [&](auto count) { return pack<count.value>(p, d, batch, panel, span, shared); });
  for (int64_t piece = first; piece < last; ++piece)
    reinterpret_cast<Head*>(shared + head_of(d, batch, panel, piece))->slices = slices;
}

//
// The weight
//

// Decodes whole segments to unsigned bytes.
template <int kBits>
void decode_segments(const uint8_t* codes, int64_t segments, I table, uint8_t* out) {
  for (int64_t i = 0; i < segments; ++i) {
    const I bytes = _mm512_loadu_si512(codes + 64 * i);
#pragma GCC unroll 8
    for (int plane = 0; plane < 8 / kBits; ++plane, out += 64) {
      const I index = _mm512_and_si512(_mm512_srli_epi16(bytes, plane * kBits), _mm512_set1_epi8((1 << kBits) - 1));
      _mm512_storeu_si512(out, _mm512_shuffle_epi8(table, index));
    }
  }
}

// Some rows of the weight and a piece of a panel.
struct Tile {
  const uint8_t* w;
  int64_t stride, rows;
  const uint8_t* x;
  const Head* head;
  const Place* place;
  const float* scales;  // the scales of the first row
  const int32_t* zeros;
  float *sums, *totals;  // sums of rows over this span, and over the spans before
  bool begins, ends;     // whether the span begins or ends here
  const char* next;      // lines to prefetch, of eight rows of the weight or more, and their distance
  int64_t next_row;
  const char* next_scale;  // scales of the next span, their distance, and their bytes
  int64_t scale_row, next_scales;
};

// Rows of the weight that a thread multiplies.
struct Unit {
  const Problem& p;
  const Detail& d;
  const int64_t row, count;  // the first row, and the number of rows
  uint8_t *const decoded, *const raw;
  float* const scales;   // scales of integers, by rows, `kScaleRoom` apart, and blocks of a span
  int32_t* const zeros;  // their zero points
  const int32_t lowest;
  const I table;     // the table of bytes, repeated in each quarter
  uint64_t odd = 0;  // rows whose scales are not ordinary

  Unit(const Problem& p, const Detail& d, int64_t batch, int64_t first, int64_t count, char* own)
      : p(p), d(d), row(first_row(&p, batch) + first), count(count), decoded(reinterpret_cast<uint8_t*>(own)),
        raw(decoded + Room(d).raw), scales(reinterpret_cast<float*>(own + Room(d).scales)),
        zeros(reinterpret_cast<int32_t*>(own + Room(d).zeros)), lowest(lowest_integer(p, d.factor)),
        table(_mm512_shuffle_i32x4(integers_table(p, d.factor), integers_table(p, d.factor), 0)) {}

  // Decodes the scales and zero points of a span.
  void fetch(const Place& place) {
    const F factor = _mm512_set1_ps(1 / static_cast<float>(d.factor));
    for (int64_t i = 0; i < count; ++i) {
      float* scale = scales + i * kScaleRoom;
      avx512::decode_scales(&p, row + i, place.first, place.first + place.blocks, scale);
      for (int64_t b = 0; b < place.blocks; b += 16) {
        const F one = _mm512_mul_ps(_mm512_maskz_loadu_ps(first_few(place.blocks - b), scale + b), factor),
                size = _mm512_abs_ps(one);
        const __mmask16 ordinary = _mm512_cmp_ps_mask(size, _mm512_set1_ps(1 / kRangeOfScales), _CMP_GE_OQ) &
                                   _mm512_cmp_ps_mask(size, _mm512_set1_ps(kRangeOfScales), _CMP_LE_OQ);
        odd |= static_cast<uint64_t>((ordinary | _mm512_cmp_ps_mask(size, _mm512_setzero_ps(), _CMP_EQ_OQ)) != 0xffff)
            << i;
        _mm512_storeu_ps(scale + b, one);
      }
      if (p.zero_point == nullptr) continue;
      int32_t* zero = zeros + i * kScaleRoom;
      unpack_zero_points(p, row + i, place.first, place.first + place.blocks, zero);
      for (int64_t b = 0; b < place.blocks; ++b) zero[b] = lowest - zero[b];
    }
  }

  // Finds the codes of a later piece to prefetch; after the last piece, codes of the next rows.
  const char* after(int64_t piece) const {
    const int64_t later = piece + kLater, rows = later < d.pieces ? 0 : count;
    return reinterpret_cast<const char*>(p.codes + (row + rows) * p.words) + later % d.pieces * d.piece * p.bits / 8;
  }

  // Finds the scales to prefetch, if a span begins with that piece.
  void scales_after(int64_t piece, Tile* a) const {
    const int64_t later = (piece + kLater) % d.pieces, width = scale_bytes(p.scale_kind),
                  block = later * d.piece / p.block_size;
    a->scale_row = p.blocks * width;
    a->next_scale = static_cast<const char*>(p.scale) + (row + (piece + kLater < d.pieces ? 0 : count)) * a->scale_row +
                    block * width;
    a->next_scales =
        p.blocks <= 1 || later % pieces_of_span(d) > 0 ? 0 : min64(a->scale_row, kSpan / p.block_size * width + 63);
  }

  // Returns codes `first` to `last` of all rows as bytes, and the distance of rows.
  const uint8_t* decode(int64_t first, int64_t last, int64_t* stride) const {
    const int64_t segment = 512 / p.bits;
    const bool whole = first + round_up(last - first, segment) <= p.k;
    const uint8_t* codes = p.codes + row * p.words + first * p.bits / 8;
    *stride = p.words;
    if (whole && p.bits == 8) return codes;
    *stride = row_room(d);
    for (int64_t i = 0; i < count; ++i, codes += p.words) {
      uint8_t* out = decoded + i * *stride;
      if (whole) {
        const int64_t segments = div_up(last - first, segment);
        p.bits == 4   ? decode_segments<4>(codes, segments, table, out)
        : p.bits == 2 ? decode_segments<2>(codes, segments, table, out)
                      : decode_segments<1>(codes, segments, table, out);
        continue;
      }
      const Integers as_stored = {};
      const uint8_t* some = some_codes(p, as_stored, row + i, first, last, raw);
      for (int64_t k = 0; k < last - first; k += 64) {
        // Codes of eight bits are read in place, which may be the end of the weight.
        const I bytes = _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - min64(last - first - k, 64)), some + k);
        _mm512_storeu_si512(out + k, p.bits == 8 ? bytes : _mm512_shuffle_epi8(table, bytes));
      }
    }
    return decoded;
  }
};

//
// Products
//

template <int kX, bool kZero>
void multiply(const Tile& a) {
  constexpr int kHigh = tile_rows(kX), kFetched = kHigh < 8 ? 8 : kHigh;
  const uint8_t* w[kHigh];
#pragma GCC unroll 12
  for (int i = 0; i < kHigh; ++i) w[i] = a.w + min64(i, a.rows - 1) * a.stride;
  const uint8_t* x = a.x;
  const F power = _mm512_set1_ps(256);
  for (int64_t run = 0; run < a.place->count; ++run) {
    const int64_t groups = a.place->runs[run].groups, block = a.place->runs[run].block;
    I sums[kHigh][kX];
#pragma GCC unroll 12
    for (int i = 0; i < kHigh; ++i)
#pragma GCC unroll 4
      for (int slice = 0; slice < kX; ++slice) {
        sums[i][slice] = _mm512_load_si512(a.head->start[run][slice]);
        if (kZero)
          sums[i][slice] = _mm512_mullo_epi32(sums[i][slice], _mm512_set1_epi32(a.zeros[i * kScaleRoom + block]));
      }
    for (int64_t group = 0; group < groups; ++group, x += 64 * kX) {
      _mm_prefetch(a.next + group % kFetched * a.next_row + group / kFetched * 64, _MM_HINT_T1);
      I xs[kX];
#pragma GCC unroll 4
      for (int slice = 0; slice < kX; ++slice) xs[slice] = _mm512_load_si512(x + 64 * slice);
#pragma GCC unroll 12
      for (int i = 0; i < kHigh; ++i) {
        int32_t four;
        memcpy(&four, w[i] + 4 * group, 4);
        const I ws = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int slice = 0; slice < kX; ++slice) sums[i][slice] = _mm512_dpbusd_epi32(sums[i][slice], ws, xs[slice]);
      }
    }
    const bool begins = a.begins && run == 0;
#pragma GCC unroll 12
    for (int i = 0; i < kHigh; ++i) {
      w[i] += 4 * groups;
      F sum = _mm512_cvtepi32_ps(sums[i][0]);
#pragma GCC unroll 4
      for (int slice = 1; slice < kX; ++slice) sum = _mm512_fmadd_ps(sum, power, _mm512_cvtepi32_ps(sums[i][slice]));
      const F before = begins ? _mm512_setzero_ps() : _mm512_load_ps(a.sums + 16 * i);
      _mm512_store_ps(a.sums + 16 * i, _mm512_fmadd_ps(sum, _mm512_set1_ps(a.scales[i * kScaleRoom + block]), before));
    }
  }
  for (int64_t line = 0; line < a.next_scales; line += 64)
    for (int64_t i = 0; i < kHigh; ++i) _mm_prefetch(a.next_scale + i * a.scale_row + line, _MM_HINT_T1);
  if (!a.ends) return;
  const F scale = _mm512_load_ps(a.head->scale);
#pragma GCC unroll 12
  for (int i = 0; i < kHigh; ++i)
    _mm512_store_ps(a.totals + 16 * i,
                    _mm512_fmadd_ps(_mm512_load_ps(a.sums + 16 * i), scale, _mm512_load_ps(a.totals + 16 * i)));
}

template <int kX>
EQQ_INLINE void multiply_rows(const Problem& p, Tile a, int64_t count) {
  constexpr int kHigh = tile_rows(kX);
  for (int64_t i = 0; i < count; i += kHigh) {
    a.rows = min64(kHigh, count - i);
    p.zero_point == nullptr ? multiply<kX, false>(a) : multiply<kX, true>(a);
    a.w += kHigh * a.stride;
    a.next += kHigh * a.next_row;
    a.next_scale += kHigh * a.scale_row;
    a.scales += kHigh * kScaleRoom;
    a.zeros += kHigh * kScaleRoom;
    a.sums += kHigh * 16;
    a.totals += kHigh * 16;
  }
}

void run(const Problem* problem, const Plan* plan, const void* memory, void* mine, int64_t unit) {
  const Problem& p = *problem;
  const Detail d = detail_of<Detail>(plan);
  const Room room(d);
  const char* shared = static_cast<const char*>(memory);
  char* own = static_cast<char*>(mine);
  const Extent e(p, d, unit);
  const int64_t batch = e.batch, first = e.first, count = e.count, panel = e.panel, panels = e.panels;
  const Place* places = reinterpret_cast<const Place*>(shared);
  const auto head_at = [&](int64_t j, int64_t piece) {
    return reinterpret_cast<const Head*>(shared + head_of(d, batch, panel + j, piece));
  };
  bool ordinary[kUnitPanels];
  for (int64_t j = 0; j < panels; ++j) {
    ordinary[j] = true;
    for (int64_t piece = 0; piece < d.pieces; piece += pieces_of_span(d))
      ordinary[j] = ordinary[j] && head_at(j, piece)->slices > 0;
  }
  Unit u(p, d, batch, first, count, own);
  float *sums = reinterpret_cast<float*>(own + room.sums), *totals = reinterpret_cast<float*>(own + room.totals);
  memset(totals, 0, 64 * d.rows * panels);
  Tile a;
  a.scales = u.scales;
  a.zeros = u.zeros;
  for (int64_t piece = 0; piece < d.pieces; ++piece) {
    a.begins = piece % pieces_of_span(d) == 0;
    a.ends = (piece + 1) % pieces_of_span(d) == 0 || piece + 1 == d.pieces;
    a.place = places + piece;
    if (a.begins) u.fetch(*a.place);
    a.w = u.decode(piece * d.piece, min64((piece + 1) * d.piece, p.k), &a.stride);
    for (int64_t j = 0; j < panels; ++j) {
      if (!ordinary[j]) continue;
      a.head = head_at(j, piece);
      a.x = reinterpret_cast<const uint8_t*>(shared) + x_of(d, batch, panel + j, piece);
      a.sums = sums + j * d.rows * 16;
      a.totals = totals + j * d.rows * 16;
      a.next = u.after(piece);
      a.next_row = j == 0 ? p.words : 0;
      u.scales_after(piece, &a);
      a.head->slices == 2   ? multiply_rows<2>(p, a, count)
      : a.head->slices == 3 ? multiply_rows<3>(p, a, count)
                            : multiply_rows<4>(p, a, count);
    }
  }
  for (int64_t j = 0; j < panels; ++j) {
    const int64_t m = kRows * (panel + j);
    for (int64_t n = 0; ordinary[j] && n < count; n += 16)
      write_results(p, batch * p.y_batch + m * p.y_row + (first + n) * p.y_column, min64(16, count - n),
                    min64(kRows, p.m - m), totals + (j * d.rows + n) * 16);
    multiply_unusual(
        avx512::kMatmul, p, e, j, ordinary[j], [&](int64_t n) { return (u.odd >> n & 1) != 0; }, own + room.spare);
  }
}

}  // namespace

extern const MatmulKernel kMatmulSlices = {plan, prepare, run, accepts, nullptr, &avx512::kMatmul};
extern const MatmulKernel kMatmulSlicesVbmi = {plan, prepare, run, accepts, nullptr, &avx512vbmi::kMatmul};
