// A row of the weight as bytes, one for each code, for kernels that multiply many codes in one instruction.
//
// A row is a number of runs: the codes of one block, or a part of a very long one. In memory of ours a run is padded to
// 16, 32 or a multiple of 64 codes, so that every block size has the same fast path. Rows are taken a step at a time:
// some runs, or a part of one. As in `kernels.h`, nothing here is seen by another file, and nothing is of `std::`.
#pragma once

#include <stdint.h>
#include <string.h>

#include "core/ints.h"
#include "core/isa.h"
#include "core/vectors.h"

namespace {

constexpr int64_t kStep = 1024;           // codes that are decoded at a time
constexpr int64_t kLongest = 32768;       // codes of a run: sums of products of bytes fit in 32 bits
constexpr int64_t kStepRoom = 2048 + 64;  // bytes that unpacking needs: a step, and the rest of two segments

struct Runs {
  int64_t block;      // codes that share a scale
  int64_t per_block;  // runs of a whole block
  int64_t real;       // codes of a whole run, without padding
  int64_t size;       // with it
  int64_t count;      // of a row
  int64_t padded;     // codes of a row with padding: count * size
};

EQQ_INLINE Runs runs_of(const Problem& p) {
  Runs r;
  r.block = p.blocks <= 1 ? max64(p.k, 1) : p.block_size;
  r.per_block = div_up(r.block, kLongest);
  r.real = r.per_block == 1 ? r.block : round_up(div_up(r.block, r.per_block), 64);
  const int64_t whole = p.k == 0 ? 0 : (p.k - 1) / r.block;
  r.count = whole * r.per_block + div_up(p.k - whole * r.block, r.real);
  r.size = r.count <= 1 || r.real > 32 ? round_up(r.real, 64) : r.real > 16 ? 32 : 16;
  r.padded = r.count * r.size;
  return r;
}

// Where a run starts in its row, and how many codes it has.
EQQ_INLINE int64_t run_start(const Runs& r, int64_t run) {
  return run / r.per_block * r.block + run % r.per_block * r.real;
}
EQQ_INLINE int64_t run_length(const Runs& r, int64_t k, int64_t run) {
  const int64_t block_end = min64((run / r.per_block + 1) * r.block, k);
  return min64(r.real, block_end - run_start(r, run));
}

struct Step {
  int64_t run, runs;  // the first, and how many
  int64_t offset;     // in the run, if the step is a part of it
  int64_t length;     // codes of each run, with padding
  bool begins, ends;  // whether the step has the first codes of its runs, and the last
};

// The first step of a row, of at most `most` codes.
EQQ_INLINE Step first_step(const Runs& r, int64_t most = kStep) {
  Step s;
  s.run = s.offset = 0;
  s.begins = true;
  s.ends = r.size <= most;
  s.runs = s.ends ? min64(most / r.size, r.count) : 1;
  s.length = min64(r.size, most);
  return s;
}

// Whether there is a further one.
EQQ_INLINE bool next_step(const Runs& r, Step& s, int64_t most = kStep) {
  if (s.ends) {
    s.run += s.runs;
    s.offset = 0;
    s.runs = min64(s.runs, r.count - s.run);
  } else {
    s.offset += s.length;
  }
  if (r.size > most) s.length = min64(most, r.size - s.offset);
  s.begins = s.offset == 0;
  s.ends = s.offset + s.length == r.size;
  return s.run < r.count;
}

EQQ_INLINE int64_t step_codes(const Step& s) { return s.runs * s.length; }

// How bytes become integers. `code << shift`, or `table[code]`, is the value of a code less the lowest of all codes.
struct Integers {
  int32_t lowest;
  int32_t shift;
  bool looks_up;
  uint8_t table[16];
};

// Of a problem that `check_int8` accepts.
EQQ_INLINE Integers integers_of(const Problem& p) {
  Integers v;
  v.shift = 0;
  v.looks_up = false;
  if (p.bits == 8) {
    v.lowest = static_cast<int32_t>(p.table[0]);
    return v;
  }
  const int codes = 1 << p.bits;
  float lowest = p.table[0];
  for (int i = 1; i < codes; ++i) lowest = p.table[i] < lowest ? p.table[i] : lowest;
  v.lowest = static_cast<int32_t>(lowest);
  for (int i = 0; i < 16; ++i) v.table[i] = static_cast<uint8_t>(p.table[i % codes] - lowest);
  while (v.shift < 4 && v.table[1] > 1 << v.shift) ++v.shift;
  for (int i = 0; i < codes; ++i) v.looks_up = v.looks_up || v.table[i] != i << v.shift;
  if (v.looks_up) v.shift = 0;
  return v;
}

// The largest value of a code less the lowest.
EQQ_INLINE int32_t largest_code(const Problem& p) {
  if (p.bits == 8) return 255;
  const Integers v = integers_of(p);
  int32_t largest = 0;
  for (int i = 0; i < 1 << p.bits; ++i) largest = v.table[i] > largest ? v.table[i] : largest;
  return largest;
}

template <int kBits>
EQQ_INLINE void unpack_segment(const uint8_t* bytes, int64_t plane, int shift, uint8_t* out) {
  constexpr uint64_t kMask = 0x0101010101010101u * ((1 << kBits) - 1);
  Segment all;
  memcpy(&all, bytes, sizeof all);
#pragma GCC unroll 8
  for (int i = 0; i < 8 / kBits; ++i) {
    const Segment some = (all >> (i * kBits) & kMask) << shift;
    memcpy(out + i * plane, &some, sizeof some);
  }
}

// Codes `from` to `to` of a row, in `room`, which has `kStepRoom` bytes; returns where the first of them is.
template <int kBits>
static const uint8_t* unpack_row(const Problem& p, int64_t row, int64_t from, int64_t to, int shift, uint8_t* room) {
  constexpr int64_t kCodes = 64 * (8 / kBits);
  const int64_t whole = p.k / kCodes, first = from / kCodes;
  const uint8_t* bytes = p.codes + row * p.words;
  for (int64_t s = first; s * kCodes < to; ++s) {
    uint8_t* out = room + (s - first) * kCodes;
    if (s < whole) {
      unpack_segment<kBits>(bytes + s * 64, 64, shift, out);
    } else {
      // The planes of the last segment are short, and each writes over the excess of the previous one.
      uint8_t tail[64] = {0};
      const int64_t count = p.words - whole * 64;
      memcpy(tail, bytes + whole * 64, count);
      unpack_segment<kBits>(tail, count, shift, out);
    }
  }
  return room + (from - first * kCodes);
}

EQQ_INLINE const uint8_t* some_codes(const Problem& p, const Integers& v, int64_t row, int64_t from, int64_t to,
                                     uint8_t* room) {
  const uint8_t* codes;
  switch (p.bits) {
    case 8: return p.codes + row * p.words + from;
    case 4: codes = unpack_row<4>(p, row, from, to, v.shift, room); break;
    case 2: codes = unpack_row<2>(p, row, from, to, v.shift, room); break;
    default: codes = unpack_row<1>(p, row, from, to, v.shift, room);
  }
  if (v.looks_up) {
    uint8_t* bytes = room + (codes - room);
    for (int64_t i = 0; i < to - from; ++i) bytes[i] = v.table[bytes[i] & 15];
  }
  return codes;
}

// Where a row is from the code on that a step begins with.
EQQ_INLINE int64_t step_start(const Runs& r, const Step& s) { return run_start(r, s.run) + s.offset; }

// Where the codes of a step are in their row: all in a row, unless there is padding between runs.
EQQ_INLINE bool in_a_row(const Runs& r, const Step& s) { return s.runs == 1 || r.size == r.real; }

}  // namespace
