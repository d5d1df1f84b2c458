// Floats on AMX, as integers.
//
// Numbers of x and of the weight become integers of 24 bits, relative to the largest of 1024 numbers of a row. Their
// three bytes, slices, are tiles of their own. Products of slices are exact, and products of one order are added up in
// one tile of results. Orders below the last bit are left out, so three slices need six products. This is Ozaki's
// scheme (https://arxiv.org/abs/2306.11975). It takes half the time of three terms of bfloat16 each, and scales of
// blocks cost nothing: they are in the slices. A weight of small integers with one scale for a row has one slice, and
// three products.
//
// Slices of x are signed. Slices of the weight are unsigned: results begin with the correction of their bias.
//
// A number much smaller than the largest keeps few bits. So x is checked while it is packed, 16 rows of it at a time: a
// panel. Where a number stands out of 1024, these have a fourth slice; where that is too little for many, or one is not
// finite, very large or very small, AVX-512 multiplies the panel. Rows of the weight whose scales are not ordinary, or
// which hold NaN, are AVX-512's as well. So are few rows of x, transposed products, and blocks that are no multiple of
// 16.
//
// Rows are decoded and then multiplied, 16 at a time. Decoding one step while another is multiplied was not faster:
// what limits both are loads and stores.
#include "amx/float_unit.h"
#include "int8/int8.h"

namespace {

//
// x
//

void keep_sums(const Problem& p, const Detail& d, const I* sums, Sums& out) {
  const int32_t more = d.w_slices == 1 ? -lowest_integer(p, integer_factor(p)) : kMore;
  for (int order = 0; order < 4; ++order) {
    I start = _mm512_setzero_si512();
    for (int slice = 0; slice <= order && slice < d.w_slices; ++slice)
      start = _mm512_sub_epi32(start, _mm512_mullo_epi32(sums[order - slice], _mm512_set1_epi32(more)));
    _mm512_store_si512(out.all[order], sums[order]);
    _mm512_store_si512(out.start[order], start);
  }
}

// Packs a chunk of a panel. Returns whether this number of slices is enough.
template <int kX>
bool pack(const Problem& p, const Detail& d, int64_t batch, int64_t panel, const Span& span, char* shared) {
  const int64_t size = piece_of(p, d);
  Head* head = reinterpret_cast<Head*>(shared + head_of(d, batch, panel, span.first / kSpan));
  I all[4] = {};
  const auto where = [&](int64_t k) {
    const int64_t piece = piece_at(p, d, batch, panel, span.first + k / size * size);
    return Slices{reinterpret_cast<uint8_t*>(shared) + piece + k % size / 64 * kX * kTile + k % 64 * 16, 64, kTile};
  };
  const auto keep = [&](int64_t end, const I* sums) {
    if (end % size > 0 && end < round_up(span.count, 64)) return false;
    keep_sums(p, d, sums, head->pieces[(end - 1) / size]);
    for (int slice = 0; slice < 4; ++slice) all[slice] = _mm512_add_epi32(all[slice], sums[slice]);
    return true;
  };
  const bool enough = pack_slices<kX>(p, span, head->scale, where, keep);
  keep_sums(p, d, all, head->chunk);
  return enough;
}

void pack(const Problem& p, const Detail& d, int64_t batch, int64_t panel, int64_t first, char* shared) {
  const Span span(p, batch, panel, first);
  const bool short_rows = d.w_slices > 1 && p.k < kShort;
  const int64_t slices =
      pack_fewest(p, span, short_rows, [&](auto count) { return pack<count.value>(p, d, batch, panel, span, shared); });
  reinterpret_cast<Head*>(shared + head_of(d, batch, panel, first / kSpan))->slices = slices;
}

//
// Problems
//

bool accepts(const Problem* problem) {
  const Problem& p = *problem;
  if (p.transpose || p.k <= 0 || (p.blocks > 1 && p.block_size % 16 != 0)) return false;
  if (p.m < (p.blocks > 1 && p.block_size % 32 != 0 ? kFewestOfMany : kFewest)) return false;
  const float most = most_of(p, reach_of(p));
  return most >= 0x1p-32f && most <= 0x1p32f;
}

// Whether values of codes of eight bits are integers of a signed byte. Codes that do not occur repeat the last value.
bool has_signed_bytes(const Problem& p) {
  return p.values == kValueInteger && p.zero_point == nullptr && p.table[0] >= -128 && p.table[255] <= 127;
}

void plan(const Problem* problem, int64_t threads, Plan* out) {
  const Problem& p = *problem;
  Detail d;
  const bool integers = p.blocks <= 1 && integer_factor(p) > 0;
  d.kind = integers                                 ? (p.bits == 8 ? kDirect : kPlain)
         : p.bits < 8                               ? kScaled
         : p.blocks <= 1 && p.zero_point == nullptr ? kLookUp
         : has_signed_bytes(p)                      ? kScaledIntegers
                                                    : kFloats;
  d.w_slices = integers ? 1 : kSlices;
  d.panels = div_up(p.m, kRows);
  d.row_blocks = div_up(d.panels, kUnitPanels);
  d.parts = div_up(p.k, kSpan);
  d.packed = div_up(p.k, 64) * kMostSlices * kTile;
  // One thread, as with slabs, takes large units: only within a unit the next rows are fetched.
  const int64_t wanted = threads > 1 ? (d.panels > 1 ? 4 : 16) * threads : 1;
  int64_t rows = div_up(p.n * p.batch * d.row_blocks, wanted);
  rows = max64(rows, (int64_t{1} << 18) / (p.m * p.k));
  d.rows = min64(round_up(min64(rows, p.n), kRows), kUnitRows);
  d.chunks = div_up(p.n, d.rows);
  d.together = d.panels > 1 && d.parts > 1 ? d.rows / kRows : 1;
  d.spare = spare_of(select_kernel(&avx512vbmi::kMatmul, p), p, d.rows);
  out->parts = p.batch * d.panels * d.parts;
  out->shared_bytes = x_at(p, d) + p.batch * d.panels * d.packed;
  out->units = p.batch * d.row_blocks * d.chunks;
  out->own_bytes = round_up(Room(d).all, 64);
  // So few rows at a time that packed x stays in the cache, yet units for all threads.
  out->rows = kRows * kUnitPanels * div_up(4 * threads, p.batch * d.chunks);
  set_detail(d, out);
}

// The bytes of the slices of 256 values, high ones first.
void fill_tables(const Problem& p, uint8_t* tables) {
  const float most = most_of(p, reach_of(p)), factor = integers_in_one(most);
  for (int i = 0; i < 256; i += 16) {
    const F values = _mm512_loadu_ps(p.table + i);
    const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(values), _mm512_set1_ps(most), _CMP_LE_OQ);
    alignas(64) uint8_t bytes[64];
    _mm512_store_si512(bytes, slices_of(_mm512_maskz_mov_ps(finite, values), _mm512_set1_ps(factor)));
    for (int j = 0; j < 16; ++j)
      for (int slice = 0; slice < kSlices; ++slice) tables[256 * slice + i + j] = bytes[4 * j + kSlices - 1 - slice];
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
    for (int64_t chunk = 0; chunk < d.parts; ++chunk) ordinary[j] = ordinary[j] && head_at(j, chunk)->slices > 0;
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
          for (int64_t j = 0; j < panels; ++j, a.x += a.steps * kMostSlices * kTile) {
            if (!ordinary[j]) continue;
            const Head* head = head_at(j, part);
            a.sums = panels > 1 ? head->pieces + (from - k) / size : &head->chunk;
            multiply_of(d.w_slices, head->slices)(p, a, next, pending);
            if (!a.last) continue;
            const int64_t m = kRows * (panel + j), n = kRows * tile;
            pending.done = 0;
            pending.results = a.results;
            pending.orders = last_order(static_cast<int>(head->slices)) + 1;
            pending.x_scale = head->scale;
            pending.x_sums = a.sums;
            _mm512_storeu_ps(pending.factor, _mm512_mul_ps(u.factor, _mm512_set1_ps(lowest_power(d.w_slices))));
            _mm512_storeu_si512(pending.zero, u.zero);
            pending.zeros = d.w_slices == 1 && p.zero_point != nullptr;
            pending.sums = sums + ((tile - group) * panels + j) * 256;
            pending.first = part == 0 && (panels == 1 || from == k);
            pending.last = to == p.k;
            pending.at = batch * p.y_batch + m * p.y_row + (first + n) * p.y_column;
            pending.rows = min64(kRows, count - n);
            pending.lanes = min64(kRows, p.m - m);
            a.results = a.results == results ? results + kMostSlices : results;
          }
        }
      }
    }
  }
  finish(p, pending);
  _tile_release();
  const auto odd = [&](int64_t n) { return (u.odd[n / kRows] >> n % kRows & 1) != 0; };
  const MatmulKernel& other = select_kernel(&avx512vbmi::kMatmul, p);
  for (int64_t j = 0; j < panels; ++j) multiply_unusual(other, p, e, j, ordinary[j], odd, own + room.spare);
}

}  // namespace

extern const MatmulKernel kMatmulManyAmx = {plan, prepare, run, accepts, nullptr, &avx512vbmi::kMatmul};
