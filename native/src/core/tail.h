// Lets the kernels of whole segments multiply a partial last segment of a row: each of its planes is padded to 64
// bytes, and x is zero in the padding. Codes there belong to the next row, or are zero.
#pragma once

#include <string.h>

#include "core/ints.h"
#include "core/isa.h"

namespace {

// The block of each group of lanes of a partial last segment.
struct TailGroups {
  int64_t first, count;  // where the segment begins in its row, and its codes
  int64_t plane;         // bytes, and so codes, of a plane
  int64_t planes;
  int64_t groups;  // of a plane, of equal length: 1, 2 or 4; 0 if even groups of 16 lanes have several blocks
  int64_t block, blocks;
  int32_t at[32];  // the block of each group, counted from `block`; -1 for padding
};

// Divides each plane into so many groups; returns whether each lies in one block.
EQQ_INLINE bool divide_tail(const Problem& p, int64_t groups, TailGroups* t) {
  const int64_t width = kPlane / groups;
  for (int64_t i = 0; i < t->planes * groups; ++i) {
    const int64_t begin = i % groups * width, start = i / groups * t->plane;
    const int64_t first = start + begin, last = min64(start + min64(begin + width, t->plane), t->count) - 1;
    t->at[i] = -1;
    if (begin >= t->plane || first > last) continue;
    const int64_t block = p.blocks <= 1 ? 0 : (t->first + first) / p.block_size;
    if (p.blocks > 1 && (t->first + last) / p.block_size != block) return false;
    t->at[i] = static_cast<int32_t>(block - t->block);
  }
  t->groups = groups;
  return true;
}

EQQ_INLINE TailGroups tail_groups(const Problem& p) {
  TailGroups t;
  t.planes = 8 / p.bits;
  t.first = p.k / (kPlane * t.planes) * (kPlane * t.planes);
  t.count = p.k - t.first;
  t.plane = packed_bytes(p.k, p.bits) - packed_bytes(t.first, p.bits);
  t.block = p.blocks <= 1 ? 0 : t.first / p.block_size;
  t.blocks = max64(p.blocks, 1) - t.block;
  t.groups = 0;
  for (int64_t groups = 1; t.count > 0 && groups <= 4 && t.groups == 0; groups *= 2) divide_tail(p, groups, &t);
  return t;
}

// Copies the values of blocks, from `t.block` on, to their groups.
template <typename T>
EQQ_INLINE void spread_tail(const TailGroups& t, const T* blocks, T* out) {
  for (int64_t i = 0; i < t.planes * t.groups; ++i) out[i] = t.at[i] < 0 ? 0 : blocks[t.at[i]];
}

}  // namespace
