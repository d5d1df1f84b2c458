// Codes by the definition of their packing, bit by bit: of single values, and of codecs.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "core/problem.h"

// Code `k` of a row.
inline int code_at(const uint8_t* row, int64_t length, int bits, int64_t k) {
  if (bits == 8) return row[k];
  if (is_split(bits)) {  // each part is packed as if there were no other
    const int64_t segment = 64 * (8 / (bits & -bits)), first = k / segment * segment,
                  count = std::min(segment, length - first);
    int code = 0, shift = 0;
    row += first / segment * segment * bits / 8;
    for (int width = 4; width > 0; width /= 2) {
      if ((bits & width) == 0) continue;
      code |= code_at(row, count, width, k - first) << shift;
      shift += width;
      row += (count * width + 7) / 8;
    }
    return code;
  }
  const int64_t planes = 8 / bits, segment = 64 * planes, whole = length / segment;
  const int64_t index = k / segment, rest = k % segment;
  const int64_t plane = index < whole ? 64 : ((length - whole * segment) * bits + 7) / 8;
  return row[index * 64 + rest % plane] >> (rest / plane * bits) & ((1 << bits) - 1);
}

struct NamedCodec {
  std::string name;
  Codec codec;
  std::vector<int8_t> vectors;
  int bits = 8;  // of what it decodes to
};

// A trellis of each width, and grids with each kind of parts.
inline const std::vector<NamedCodec>& all_codecs() {
  static const std::vector<NamedCodec> all = [] {
    std::vector<NamedCodec> found;
    for (const int bits : {1, 2, 3, 4}) {
      Codec codec = {};
      codec.kind = kTrellis;
      codec.bits = bits;
      codec.multipliers = 0x9e3779b1u + 0x01234567u * static_cast<uint32_t>(bits);
      found.push_back({"trellis of " + std::to_string(bits) + " bits", codec, {}});
    }
    std::mt19937 random(5);
    const auto add_grid = [&](const char* name, int size, int index_bits, CodecPart moves) {
      Codec codec = {};
      codec.kind = kGrid;
      codec.size = size;
      for (int low = 0; low < index_bits; low += 8)
        codec.parts[codec.num_parts++] = {kIndex, std::min(8, index_bits - low), low, size};
      codec.parts[codec.num_parts++] = moves;
      std::vector<int8_t> vectors(static_cast<size_t>(size) << index_bits);
      for (int8_t& value : vectors)
        value = static_cast<int8_t>(moves.kind == kDown ? static_cast<int>(random() % 3) * 8 - 8 : random() % 120);
      found.push_back({name, codec, vectors, moves.kind == kDown ? 5 : 8});
    };
    add_grid("grid of 8, even signs", 8, 8, {kEvenSigns, 7, 0, 8});
    add_grid("grid of 8, 9 bits, even signs", 8, 9, {kEvenSigns, 7, 0, 8});
    add_grid("grid of 8, 10 bits, signs", 8, 10, {kSigns, 8, 0, 8});
    add_grid("grid of 8, 11 bits, directions of 32", 8, 11, {kDown, 1, 0, 32});
    add_grid("grid of 8, 11 bits, directions of 8", 8, 11, {kDown, 1, 0, 8});
    add_grid("grid of 4, even signs", 4, 8, {kEvenSigns, 7, 0, 8});
    add_grid("grid of 4, 9 bits, signs", 4, 9, {kSigns, 8, 0, 8});
    add_grid("grid of 4, 5 bits, directions of 8", 4, 5, {kDown, 1, 0, 8});
    for (NamedCodec& one : found) one.codec.vectors = one.vectors.data();
    return found;
  }();
  return all;
}

inline int code_of_trellis(const Codec& codec, const uint8_t* row, int64_t length, int64_t k) {
  const int64_t segment = k / 128, values = std::min<int64_t>((length - segment * 128 + 15) / 16 * 16, 128);
  const uint8_t* bytes = row + segment * 16 * codec.bits;
  uint32_t window = 0;
  for (int i = 0; i < 12; ++i) {
    const int64_t at = (k % 128 * codec.bits + i) % (values * codec.bits);
    window |= static_cast<uint32_t>(bytes[at / 8] >> (at % 8) & 1) << i;
  }
  const uint32_t first = codec.multipliers % 65536, second = codec.multipliers / 65536;
  const uint32_t product = window * first % 65536, high = product * second / 65536;
  return static_cast<int>(product % 64 + product / 256 % 64 + high % 64 + high / 256 % 64);
}

inline int code_of_grid(const Codec& codec, const uint8_t* row, int64_t length, int bits, int64_t k) {
  const int64_t segment = k / 256, count = std::min<int64_t>(length - segment * 256, 256), i = k % 256;
  int whole = 0;  // bytes of a segment
  for (int j = 0; j < codec.num_parts; ++j) whole += 256 / codec.parts[j].values * codec.parts[j].bits / 8;
  const uint8_t* bytes = row + segment * whole;
  int index = 0, sign = 1, moved = 0;
  for (int j = 0; j < codec.num_parts; ++j) {
    const CodecPart& part = codec.parts[j];
    const int64_t codes = (count + part.values - 1) / part.values;
    const int code = code_at(bytes, codes, part.bits, i / part.values);
    int negative = 0;
    for (int bit = 0; bit < 7; ++bit) negative += code >> bit & 1;
    const bool last = part.kind == kEvenSigns ? negative % 2 : code >> 7;
    if (part.kind == kIndex) index |= code << part.low;
    if (part.kind == kDown) moved = code ? -1 : 1;
    if (part.kind == kSigns || part.kind == kEvenSigns) sign = (i % 8 == 7 ? last : code >> i % 8 & 1) ? -1 : 1;
    for (int width = 8; width > 0; width /= 2)
      if (part.bits & width) bytes += (codes * width + 7) / 8;
  }
  return (1 << (bits - 1)) + sign * codec.vectors[index * codec.size + i % codec.size] + moved;
}

// Code `k` of a row, whose codes may stand for several values; those of a grid have their zero in the middle.
inline int code_at(const Codec* codec, const uint8_t* row, int64_t length, int bits, int64_t k) {
  if (codec == nullptr) return code_at(row, length, bits, k);
  return codec->kind == kTrellis ? code_of_trellis(*codec, row, length, k) : code_of_grid(*codec, row, length, bits, k);
}
