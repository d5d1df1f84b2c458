// Trellis codes: the Viterbi algorithm. `eqquant/_numerics/trellis.py` says what the codes are.
//
// A window of bits stands for a value. The windows with the same lowest bits are a group: the same windows precede
// them. The search takes one value after the other, and keeps the best path to each group: its cost, and with feedback
// the corrections of later values (per-survivor processing).
#pragma once

#include <string.h>

#include "core/problem.h"
#include "core/vectors.h"
#include "encode/encode.h"

namespace {

typedef uint32_t Word __attribute__((may_alias));

constexpr float kImpossible = 1e30f;  // the cost of a path that does not begin where it must

// A segment of a row: `given` values, rounded up to `length` by values without weight. There is room for a whole
// segment.
struct Part {
  const float *values, *weights;
  const float* feedback;  // of one row, `stride` apart; or null
  int64_t length, given, stride;
};

template <int kBits>
struct Groups {
  static constexpr int kChoices = 1 << kBits, kCount = kTrellisWindows >> kBits;
};

// The values of all windows; the least is -123, as in `eqquant/_numerics/trellis.py`.
EQQ_INLINE void fill_table(uint32_t multipliers, float* table) {
  for (uint32_t window = 0; window < kTrellisWindows; ++window)
    table[window] = static_cast<float>(hash_window(window, multipliers) - 123);
}

// The best of the windows that precede each group, and its cost. Costs are positive, so their bits are in their order;
// the lowest bits are replaced by the choice. The least of all becomes zero, so that small costs are exact.
template <int kBits>
EQQ_INLINE void choose_paths(const float* costs, float* best, uint8_t* choices) {
  constexpr uint32_t kMask = Groups<kBits>::kChoices - 1;
  const Word* bits = reinterpret_cast<const Word*>(costs);
  Word* out = reinterpret_cast<Word*>(best);
  for (int group = 0; group < Groups<kBits>::kCount; ++group) {
    uint32_t least = bits[group << kBits] & ~kMask;
#pragma GCC unroll 16
    for (uint32_t choice = 1; choice <= kMask; ++choice) {
      const uint32_t cost = (bits[(group << kBits) + choice] & ~kMask) | choice;
      least = cost < least ? cost : least;
    }
    choices[group] = static_cast<uint8_t>(least & kMask);
    out[group] = least;
  }
  uint32_t smallest = out[0];
  for (int group = 1; group < Groups<kBits>::kCount; ++group) smallest = out[group] < smallest ? out[group] : smallest;
  float cost;
  memcpy(&cost, &smallest, sizeof cost);
  for (int group = 0; group < Groups<kBits>::kCount; ++group) best[group] -= cost;
}

// The corrections of the values from `at` on, for the best path to each group, and the corrected value `at`.
template <int kBits>
EQQ_INLINE void correct_paths(const Part& part, int64_t at, const uint8_t* choices, const float* errors,
                              const float* changes, float* changed, float* targets) {
  float row[kTrellisSegment] = {0};
  const int64_t first = at / kLanes * kLanes, stop = (part.given + kLanes - 1) / kLanes * kLanes;
  memcpy(row + at, part.feedback + (at - 1) * part.stride + at, (part.given - at) * sizeof(float));
  for (int group = 0; group < Groups<kBits>::kCount; ++group) {
    const int window = group << kBits | choices[group];
    const Floats error = Floats{} + errors[window];
    const float* from = changes + (window & (Groups<kBits>::kCount - 1)) * kTrellisSegment;
    float* to = changed + group * kTrellisSegment;
    for (int64_t i = first; i < stop; i += kLanes)
      store_vector(to + i, load_floats(from + i) + load_floats(row + i) * error);
    targets[group] = part.values[at] - to[at];
  }
}

// Finds the windows of the best sequence. `shared`: the lowest bits of its first window and the highest of its last, or
// -1 if these may differ.
template <int kBits, bool kFeedback>
EQQ_INLINE void search(const Part& part, int shared, TrellisMemory* memory, int* windows) {
  constexpr int kChoices = Groups<kBits>::kChoices, kCount = Groups<kBits>::kCount;
  TrellisMemory& m = *memory;
  float *changes = m.changes, *changed = changes + kTrellisMostGroups * kTrellisSegment;
  for (int group = 0; group < kCount; ++group) m.best[group] = shared < 0 || shared == group ? 0 : kImpossible;
  if (kFeedback) memset(changes, 0, kCount * kTrellisSegment * sizeof(float));
  for (int64_t i = 0; i < part.length; ++i) {
    uint8_t* choices = m.choices + i * kCount;
    if (i > 0) choose_paths<kBits>(m.costs, m.best, choices);
    const float value = part.values[i], weight = part.weights[i];
    if (kFeedback) {
      if (i > 0 && i < part.given) {
        correct_paths<kBits>(part, i, choices, m.errors, changes, changed, m.targets);
        float* swapped = changes;
        changes = changed;
        changed = swapped;
      } else {
        for (int group = 0; group < kCount; ++group) m.targets[group] = value;
      }
    }
    for (int choice = 0; choice < kChoices; ++choice) {
      const int first = choice * kCount;
      for (int group = 0; group < kCount; ++group) {
        const float error = (kFeedback ? m.targets[group] : value) - m.table[first + group];
        if (kFeedback) m.errors[first + group] = error;
        m.costs[first + group] = m.best[group] + weight * (error * error);
      }
    }
  }
  const int begin = shared < 0 ? 0 : shared << kBits, end = shared < 0 ? kTrellisWindows : begin + kChoices;
  int window = begin;
  for (int other = begin; other < end; ++other)
    if (m.costs[other] < m.costs[window]) window = other;
  for (int64_t i = part.length - 1; i >= 0; --i) {
    windows[i] = window;
    const int group = window & (kCount - 1);
    window = group << kBits | m.choices[i * kCount + group];  // unused at i = 0
  }
}

// Encodes a segment: a circle, whose first window begins with the bits that its last ends with. These are taken from
// the best sequence that begins half a segment later.
template <int kBits>
EQQ_INLINE void encode_segment(const Part& part, TrellisMemory* memory, uint8_t* out) {
  int windows[kTrellisSegment];
  float values[kTrellisSegment], weights[kTrellisSegment];
  const int64_t length = part.length, half = length / 2;
  memset(memory->choices, 0, Groups<kBits>::kCount);
  for (int64_t i = 0; i < length; ++i) {
    values[i] = part.values[(i + half) % length];
    weights[i] = part.weights[(i + half) % length];
  }
  search<kBits, false>({values, weights, nullptr, length, length, 0}, -1, memory, windows);
  const int shared = windows[length - half] & (Groups<kBits>::kCount - 1);
  if (part.feedback == nullptr)
    search<kBits, false>(part, shared, memory, windows);
  else
    search<kBits, true>(part, shared, memory, windows);
  memset(out, 0, length * kBits / 8);
  for (int64_t i = 0; i < length; ++i)
    for (int bit = 0; bit < kBits; ++bit) {
      const int64_t at = i * kBits + bit;
      out[at / 8] = static_cast<uint8_t>(out[at / 8] | (windows[i] >> bit & 1) << at % 8);
    }
}

template <int kBits>
EQQ_INLINE void encode_trellis_rows(const TrellisProblem& p, int64_t first_row, int64_t last_row,
                                    TrellisMemory* memory) {
  fill_table(p.multipliers, memory->table);
  for (int64_t row = first_row; row < last_row; ++row)
    for (int64_t first = 0; first < p.k; first += kTrellisSegment) {
      float values[kTrellisSegment] = {0}, weights[kTrellisSegment] = {0};
      const int64_t given = p.k - first < kTrellisSegment ? p.k - first : int64_t{kTrellisSegment};
      memcpy(values, p.values + row * p.k + first, given * sizeof(float));
      memcpy(weights, p.weights + row * p.k + first, given * sizeof(float));
      const float* feedback = p.feedback == nullptr ? nullptr : p.feedback + row / p.rows * p.k * p.k;
      const int64_t length = (given + kTrellisUnit - 1) / kTrellisUnit * kTrellisUnit;
      encode_segment<kBits>({values, weights, feedback, length, given, p.k}, memory,
                            p.y + row * p.words + first * kBits / 8);
    }
}

void encode_trellis(const TrellisProblem* p, int64_t first_row, int64_t last_row, TrellisMemory* memory) {
  switch (p->bits) {
    case 1: return encode_trellis_rows<1>(*p, first_row, last_row, memory);
    case 2: return encode_trellis_rows<2>(*p, first_row, last_row, memory);
    case 3: return encode_trellis_rows<3>(*p, first_row, last_row, memory);
    default: return encode_trellis_rows<4>(*p, first_row, last_row, memory);
  }
}

}  // namespace
