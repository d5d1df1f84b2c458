// Integer products on AMX: `tdpbusd` multiplies 16 rows of the weight by 16 of x, 64 codes at a time. One row of x
// stays with AVX-512.
//
// x is packed in panels of 16 rows: a tile of it, 16 groups of four codes of each row, is 1 KB in a row. Rows of the
// weight are multiplied where they lie if they have a byte for each code, and decoded a step at a time otherwise: well
// before tiles are loaded, since a load stalls on bytes that are still on their way to the cache.
#include "amx/int8_tiles.h"

namespace {

void plan(const Int8Problem* problem, int64_t threads, Plan* out) {
  const Problem& p = problem->p;
  if (!accepts(*problem)) return avx512vnni::kInt8.plan(problem, threads, out);
  const Runs r = runs_of(p);
  Detail d;
  d.panels = div_up(p.m, 16);
  // With many rows of x the weight stays in L2, and each pair of panels meets many of its rows: so y is written nearly
  // in its order. With fewer it is x that stays.
  if (d.panels > kMostPanels && r.count == 1 && (is_direct(p, r) || row_codes(r) <= kDecoded)) {
    const int64_t chunks = div_up(p.n, max64(min64(kCachedBytes / row_codes(r), kMostStripRows), kGroupRows));
    const int64_t enough = div_up(4 * threads, div_up(d.panels, 2) * p.batch);  // for all threads
    d.rows = d.strip = round_up(div_up(p.n, max64(chunks, enough)), kGroupRows);
    d.chunks = div_up(p.n, d.rows);
    const int64_t least =
        max64(div_up(d.panels * d.chunks * p.batch, 8 * threads), (int64_t{1} << 19) / (16 * d.rows * p.k));
    d.block = min64(round_up(max64(least, 1), 2), kMostPanels);
    d.row_blocks = div_up(d.panels, d.block);
  } else {
    d.block = min64(max64(kCachedBytes / (16 * row_codes(r)), 2), min64(kMostPanels, d.panels));
    d.row_blocks = div_up(d.panels, d.block);
    int64_t rows = div_up(p.n * p.batch * d.row_blocks, 8 * threads);
    rows = max64(rows, (int64_t{1} << 19) / (p.m * p.k));
    d.rows = min64(round_up(min64(rows, p.n), 16), kMostUnitRows);
    d.chunks = div_up(p.n, d.rows);
    d.strip = is_long(r) ? kGroupRows : 16;
  }
  d.group = min64(max64(max64(kPartValues / (16 * p.k), d.panels / (8 * threads)), 1), d.panels);
  const int64_t groups = div_up(d.panels, d.group);
  // Where there are fewer panels than threads, several share one: each finds the scales of all rows for itself.
  d.pieces = groups == d.panels ? max64(min64(div_up(threads, groups * p.batch), 16 * p.k / kPartValues), 1) : 1;
  d.sums = round_up(8 * p.batch * d.panels * 16, 64);
  d.x = d.sums + 64 * p.batch * d.panels * row_tiles(r);
  out->shared_bytes = d.x + 4096 + (p.batch * d.panels + problem->affine) * panel_bytes(r);  // and a panel of ones
  out->parts = p.batch * groups * d.pieces;
  out->units = p.batch * d.row_blocks * d.chunks;
  d.scale = d.strip * kDecoded;
  d.results = round_up(d.scale + 2 * 3 * 4 * stretches(r, d.strip), 4096);
  out->own_bytes = 4096 + d.results + 2 * max64(d.block, 2) * 4 * kGroupRows * 16;
  set_detail(d, out);
}

//
// x
//

// Packs some of a panel: `pieces` of them, of which this is one.
void pack_panel(const Int8Problem& q, const Runs& r, const Detail& d, char* shared, int64_t batch, int64_t panel,
                int64_t piece) {
  const Problem& p = q.p;
  const int64_t depth = depth_of(r), at = batch * d.panels + panel;
  Packed a = {batch, 16 * panel, piece, d.pieces, (panel + 1) % d.group > 0, nullptr, nullptr, nullptr};
  a.out = reinterpret_cast<uint8_t*>(page(shared + d.x)) + at * panel_bytes(r);
  if (piece == 0) {
    a.scales = reinterpret_cast<float*>(shared) + 16 * at;
    a.shifts = reinterpret_cast<int32_t*>(a.scales) + 16 * p.batch * d.panels;
  }
  int32_t* sums = reinterpret_cast<int32_t*>(shared + d.sums) + 16 * at * row_tiles(r);
  const I factor = V::broadcast_int(p.zero_point != nullptr ? 1 : integers_of(p).lowest), ones = _mm512_set1_epi8(1);
  pack_rows<X>(q, r, a, [=](int64_t position, int64_t width) {
    for (int64_t tile = 0; tile < width / depth; ++tile) {
      I sum = V::zero_int();
      for (int64_t i = tile * depth / 4; i < (tile + 1) * depth / 4; ++i)
        sum = V::dot(sum, ones, V::load_int(a.out + 16 * position + 64 * i));
      V::store(sums + 16 * (position / depth + tile), V::mul(sum, factor));
    }
  });
}

// A panel of rows that are all ones: its products are sums of the weight.
void pack_ones(const Problem& p, const Runs& r, uint8_t* out) {
  memset(out, 0, 16 * row_codes(r));
  for (int64_t run = 0; run < r.count; ++run, out += 16 * r.size) {
    const int64_t length = run_length(r, p.k, run);
    memset(out, 1, 64 * (length / 4));
    for (int64_t i = length / 4 * 4; i < length; ++i)
      for (int64_t lane = 0; lane < 16; ++lane) out[16 * (i / 4 * 4) + 4 * lane + i % 4] = 1;
  }
}

void prepare(const Int8Problem* problem, const Plan* plan, void* memory, int64_t part) {
  const Problem& p = problem->p;
  if (!accepts(*problem)) return avx512vnni::kInt8.prepare(problem, plan, memory, part);
  const Runs r = runs_of(p);
  const Detail d = detail_of<Detail>(plan);
  if (problem->affine && part == 0)
    pack_ones(p, r,
              reinterpret_cast<uint8_t*>(page(static_cast<char*>(memory) + d.x)) + p.batch * d.panels * panel_bytes(r));
  const int64_t piece = part % d.pieces, groups = div_up(d.panels, d.group);
  const int64_t group = part / d.pieces % groups, batch = part / d.pieces / groups;
  for (int64_t i = group * d.group; i < min64((group + 1) * d.group, d.panels); ++i)
    pack_panel(*problem, r, d, static_cast<char*>(memory), batch, i, piece);
}

//
// The weight
//

// Whole segments of a row as bytes, 64 codes 1 KB after the other.
template <int kBits>
EQQ_INLINE void unpack(const uint8_t* bytes, int64_t segments, I table, bool look_up, uint8_t* out) {
  for (int64_t s = 0; s < segments; ++s) {
    const I all = V::load_int(bytes + 64 * s);
#pragma GCC unroll 8
    for (int i = 0; i < 8 / kBits; ++i, out += 1024) {
      const I codes = V::byte_codes<kBits>(all, i);
      V::store(out, look_up ? V::lookup_bytes(table, codes) : codes);
    }
  }
}

// The codes of a step of some rows as tiles of 16 rows and 64 codes, each 1 KB; the next 16 rows are `16 * kDecoded`
// bytes on.
void decode(const Problem& p, const Runs& r, const Integers& v, const Step& s, int64_t row, int64_t count,
            uint8_t* decoded) {
  const int64_t from = step_start(r, s), segment = 64 * (8 / p.bits), codes = step_codes(s);
  const uint8_t* bytes = p.codes + row * p.words + from * p.bits / 8;
  const bool whole = in_a_row(r, s) && from % segment == 0 && codes % segment == 0 && from + codes <= p.k;
  const bool look_up = v.looks_up || v.shift > 0;
  const I table = look_up ? V::byte_table(v.table) : V::zero_int();
  for (int64_t i = 0; i < count; ++i, bytes += p.words) {
    uint8_t* out = decoded + i / 16 * 16 * kDecoded + i % 16 * 64;
    if (whole) {
      if (p.bits == 8) unpack<8>(bytes, codes / segment, table, false, out);
      if (p.bits == 4) unpack<4>(bytes, codes / segment, table, look_up, out);
      if (p.bits == 2) unpack<2>(bytes, codes / segment, table, look_up, out);
      if (p.bits == 1) unpack<1>(bytes, codes / segment, table, look_up, out);
    } else {
      uint8_t room[kStepRoom], codes_of_row[kStepRoom];
      int32_t unused[kRunRoom];
      const uint8_t* at = W::decode(p, r, v, s, row + i, unused, true, room, codes_of_row);
      for (int64_t j = 0; j < codes; j += 64) V::store(out + 16 * j, V::load_int(at + j));
    }
  }
}

// Scales of runs `first` to `last`, and what codes are off, of some rows `stretch_of` apart.
void decode_scales(const Problem& p, const Runs& r, const Integers& v, int64_t row, int64_t count, int64_t first,
                   int64_t last, float* scale, int32_t* offset) {
  const int64_t from = first / r.per_block, to = (last - 1) / r.per_block + 1, stretch = stretch_of(r);
  const bool together = r.count == 1 && p.row_scale == nullptr;
  if (together) V::scales(&p, row, 0, count, scale);
  for (int64_t i = 0; i < count; ++i, ++row, scale += stretch, offset += stretch) {
    if (!together && p.scale_kind == kScaleFloat32 && p.row_scale == nullptr) {
      const float* scales = static_cast<const float*>(p.scale) + row * p.blocks + from;
      for (int64_t j = 0; j < to - from; j += 16)
        V::store(scale + j, _mm512_maskz_loadu_ps(first_few(to - from - j), scales + j));
    } else if (!together) {
      V::scales(&p, row, from, to, scale);
    }
    if (p.zero_point != nullptr) W::offsets(p, v, row, from, to, offset);
  }
}

//
// Units
//

// The unit of a thread: rows of the weight, a strip at a time, and some panels.
struct Unit {
  const Int8Problem& q;
  const Problem& p;
  const Detail& d;
  const Runs r;
  const Integers v;
  int64_t batch, first, rows, weight;  // of the weight: the first of the batch, how many, and the first of all
  int64_t panel, panels;               // the first, and how many
  uint8_t* decoded;
  char* scale_room;
  int32_t* partial;
  float* sums;
  const float* x_scale;
  const uint8_t *x, *ones;
  const int32_t *x_sums, *shift;
  const bool is_long, corrects, strips;
  const int64_t group_rows, pair;  // of the weight, and panels, which are multiplied at a time
  Block blocks[2];                 // the last one may still be needed, and so are its scales
  alignas(64) int32_t offs[2][32];
  Finished finished;
  Ahead ahead;
  int turn = 0, scale_turn = 0, off_turn = 0;
  // Scales of the runs from `stretch` up to `known`, and the biases of their codes.
  int64_t stretch, known;
  float* scale;
  int32_t *offset, *weights;

  Unit(const Int8Problem& q, const Detail& d, const char* shared, char* own, int64_t unit)
      : q(q), p(q.p), d(d), r(runs_of(p)), v(integers_of(p)), batch(unit / d.chunks / d.row_blocks),
        first(unit % d.chunks * d.rows), rows(min64(d.rows, p.n - first)), weight(first_row(&p, batch) + first),
        panel(unit / d.chunks % d.row_blocks * d.block), panels(min64(d.block, d.panels - panel)),
        decoded(reinterpret_cast<uint8_t*>(own)), scale_room(own + d.scale),
        partial(reinterpret_cast<int32_t*>(own + d.results)),
        sums(reinterpret_cast<float*>(partial + max64(d.block, 2) * kGroupRows * 16)), is_long(::is_long(r)),
        corrects(p.zero_point != nullptr || q.affine), strips(d.strip > kGroupRows),
        group_rows(is_long ? kGroupRows : 16), pair(is_long ? 2 : 1) {
    const int64_t at = batch * d.panels + panel;
    const uint8_t* all_x = reinterpret_cast<const uint8_t*>(page(shared + d.x));
    x_scale = reinterpret_cast<const float*>(shared) + 16 * at;
    x = all_x + at * panel_bytes(r);
    ones = all_x + p.batch * d.panels * panel_bytes(r);
    x_sums = reinterpret_cast<const int32_t*>(shared + d.sums) + at * 16 * row_tiles(r);
    shift = reinterpret_cast<const int32_t*>(x_scale) + 16 * p.batch * d.panels;
  }

  // The scales of a step of some rows, if they are not known yet.
  void find_scales(const Step& s, int64_t row, int64_t count) {
    if (s.run + s.runs <= known) return;
    stretch = s.run;
    known = r.per_block > 1 ? s.run + 1 : min64(s.run + kStretchRuns, r.count);
    scale = reinterpret_cast<float*>(scale_room) + (scale_turn ^= 1) * 3 * stretches(r, d.strip);
    offset = reinterpret_cast<int32_t*>(scale + stretches(r, d.strip));
    weights = offset + stretches(r, d.strip);
    decode_scales(p, r, v, row, count, stretch, known, scale, offset);
  }

  // Where results of panel `i` and some rows of the weight go, and how many these are.
  void set_results(Block& a, int64_t i, bool two, int64_t row, int64_t count) const {
    const int64_t m = 16 * (panel + i);
    a.sums = sums + i * kGroupRows * 16;
    a.y = batch * p.y_batch + m * p.y_row + (first + row) * p.y_column;
    a.lanes = min64(two ? 32 : 16, p.m - m);
    a.count = count;
    a.x_scale = x_scale + 16 * i;
  }

  // Panel `i`, or two, a step, and rows of the weight from `group` of a strip on.
  Block& next_block(const Step& s, bool direct, int64_t i, int64_t strip, int64_t group) {
    const int64_t position = s.run * r.size + s.offset, at = group * stretch_of(r) + (s.run - stretch);
    Block& a = blocks[turn ^= 1];
    a.w = direct ? p.codes + (weight + strip + group) * p.words + position : decoded + group * kDecoded;
    a.w_row = direct ? p.words : 64;
    a.w_next = direct ? 64 : 1024;
    a.w_below = direct ? 16 * p.words : 16 * kDecoded;
    a.x = x + i * panel_bytes(r) + 16 * position;
    a.x_panel = panel_bytes(r);
    a.sums_x = x_sums + i * 16 * row_tiles(r) + 16 * s.run * (r.size / depth_of(r));
    a.off = offs[off_turn];
    a.scale = scale + at;
    a.offset = p.zero_point != nullptr ? offset + at : nullptr;
    a.shift = shift + 16 * i;
    a.weights = q.affine ? weights + at : nullptr;
    a.stretch = stretch_of(r);
    a.partial = is_long ? partial + i * kGroupRows * 16 : partial;
    a.runs = s.runs;
    a.length = s.length;
    a.depth = depth_of(r);
    a.begins = s.begins;
    a.ends = s.ends;
    a.first = s.run == 0;
    a.last = s.run + s.runs == r.count;
    return a;
  }

  void multiply(const Block& a, bool two) {
    if (!is_long) {
      corrects ? short_runs<true>(p, a, ahead) : short_runs<false>(p, a, ahead);
    } else if (two) {
      corrects ? long_run<true, true>(p, a, finished, ahead) : long_run<true, false>(p, a, finished, ahead);
    } else {
      corrects ? long_run<false, true>(p, a, finished, ahead) : long_run<false, false>(p, a, finished, ahead);
    }
  }

  // A step of the rows of a strip times all panels.
  void multiply_step(const Step& s, bool direct, int64_t strip, int64_t count) {
    const int64_t tiles = r.size / depth_of(r), position = s.run * r.size + s.offset;
    for (int64_t i = 0; i < panels; i += pair) {
      const bool two = is_long && panels - i > 1;
      int32_t* off = offs[off_turn ^= 1];
      for (int64_t j = 0; is_long && s.ends && j <= two; ++j)
        V::store(off + 16 * j, sum_of_tiles(x_sums + (i + j) * 16 * row_tiles(r) + 16 * s.run * tiles, tiles));
      if (strips && i + 2 < panels) {
        ahead.at = reinterpret_cast<const char*>(x + (i + 2) * panel_bytes(r));
        ahead.end = ahead.at + min64(2, panels - i - 2) * panel_bytes(r);
        ahead.lines = div_up(ahead.end - ahead.at, div_up(count, group_rows) * s.length);
      }
      for (int64_t group = 0; group < count; group += group_rows) {
        Block& a = next_block(s, direct, i, strip, group);
        set_results(a, i, two, strip + group, min64(group_rows, count - group));
        if (q.affine && i == 0) sum_weights(p, r, v, s, a, ones + 16 * position, a.count);
        multiply(a, two);
      }
    }
  }

  // Writes results of short runs, of all panels: others were multiplied since their lines were prefetched.
  void write_short(int64_t strip, int64_t count) {
    for (int64_t i = 0; i < panels; ++i) {
      Block& a = blocks[0];
      a.first = false;
      a.last = true;
      set_results(a, i, false, strip, count);
      F tile[16];
      take_tile(a, 0, 0, tile);
      put_tile(p, a, 0, 0, tile);
    }
  }

  void run() {
    // Of a weight that is decoded the next rows; with strips instead the next panels of x.
    const char* codes = reinterpret_cast<const char*>(p.codes + weight * p.words);
    const bool w_ahead = !is_direct(p, r) && !strips;
    ahead.at = ahead.end = codes;
    if (w_ahead) {
      ahead.end = codes + min64(d.strip, rows) * p.words;
      ahead.lines = div_up(depth_of(r) * p.bits, (is_long ? 16 : 32) * div_up(panels, pair));
      Ahead::fetch_some(ahead, d.strip * p.words);
    }
    for (int64_t strip = 0, count; strip < rows; strip += count) {
      count = min64(d.strip, rows - strip);
      if (count > group_rows) count = count / group_rows * group_rows;
      const bool direct = is_direct(p, r) && count >= group_rows;
      const int64_t most = is_long && direct  ? r.size
                         : is_long && !strips ? kDecoded / 2
                                              : kDecoded;  // some stay in L1
      if (w_ahead) ahead.end = codes + min64(strip + count + d.strip, rows) * p.words;
      Step s = first_step(r, most);
      stretch = known = 0;
      do {
        find_scales(s, weight + strip, count);
        if (!direct) decode(p, r, v, s, weight + strip, count, decoded);
        multiply_step(s, direct, strip, count);
      } while (next_step(r, s, most));
      if (!is_long) write_short(strip, count);
    }
    while (finished.tiles > 0) corrects ? finish_tile<true>(p, finished) : finish_tile<false>(p, finished);
  }
};

void run(const Int8Problem* problem, const Plan* plan, const void* memory, void* own, int64_t unit) {
  if (!accepts(*problem)) return avx512vnni::kInt8.run(problem, plan, memory, own, unit);
  const Detail d = detail_of<Detail>(plan);
  Unit u(*problem, d, static_cast<const char*>(memory), page(own), unit);
  configure(depth_of(u.r), 1 << 4 | 1 << 5);
  u.run();
  _tile_release();
}

}  // namespace

namespace amx {
extern const Int8Kernel kInt8 = {plan, prepare, run};
}
