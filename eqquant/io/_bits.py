"""Codes of few bits, from the layouts of other libraries and to our own packing, in NumPy.

NumPy takes as long to begin an inner loop as to go through dozens of bytes. So all of this works on whole runs: a run
of bytes moves as one item (`V16`, `V64`), and arithmetic takes a contiguous array as 64-bit words, whose bytes do not
disturb each other.
"""

import math

import numpy as np
from jax.typing import DTypeLike

from .._numerics.packing import num_planes, packed_length, PLANE, segment_length, widths


def as_words(x: np.ndarray) -> np.ndarray:
    """Views a contiguous array as the widest integers that it consists of."""
    return x.reshape(-1).view(f"<u{math.gcd(x.nbytes, 8)}")


def in_each_byte(value: int, words: np.ndarray) -> np.unsignedinteger:
    """Returns a word of the same bytes."""
    return words.dtype.type(int.from_bytes([value] * words.itemsize, "little"))


def take_field(blocks: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Copies some bytes of each block, which is the last axis."""
    run = stop - start
    return np.ascontiguousarray(blocks[..., start:stop].view(f"V{run}")).view(np.uint8)


def join(low: np.ndarray, high: np.ndarray, shift: int) -> np.ndarray:
    """Returns codes with more bits above their own.

    Changes both arguments, which are contiguous.
    """
    words, above = as_words(low), as_words(high)
    above <<= above.dtype.type(shift)
    words |= above
    return low


def flip(codes: np.ndarray) -> np.ndarray:
    """Turns the codes of signed bytes into codes of `Int8`, and back.

    Changes its argument, which is contiguous.
    """
    words = as_words(codes)
    words ^= in_each_byte(128, words)
    return codes


def unpack_planes(field: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Unpacks bytes along the last axis, with the codes of a byte `run` values apart.

    Code `i` of a byte belongs to the value that is `i * run` after code 0.
    """
    groups, planes = field.shape[-1] // run, 8 // bits
    packed = np.ascontiguousarray(field.view(f"V{run}"))
    words = as_words(packed)
    codes = np.empty((*field.shape[:-1], groups, planes), f"V{run}")
    for n in range(planes):
        part = words >> words.dtype.type(n * bits)
        part &= in_each_byte(2**bits - 1, words)
        codes[..., n] = part.view(packed.dtype).reshape(packed.shape)
    return codes.view(np.uint8).reshape(*field.shape[:-1], groups * planes * run)


def unpack_low_first(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks bytes along the last axis, the first code in the low bits of the first byte.

    Codes have no gaps: codes of 3, 5, 6 and 7 bits lie across bytes, and eight of them fill as many bytes.
    Little-endian words are read so too, viewed as bytes.
    """
    if bits == 8:
        return packed
    if 8 % bits:
        return _unpack_straddling(packed, bits)
    # All codes of a byte at once: code n moves from bit `n * bits` to byte n of a wider integer.
    codes = packed.astype(f"<u{8 // bits}")
    words = as_words(codes)
    byte = words.copy() if bits < 4 else words
    for n in range(1, 8 // bits):
        words |= byte << byte.dtype.type(n * (8 - bits))
    words &= in_each_byte(2**bits - 1, words)
    return codes.view(np.uint8)


def unpack_high_first(packed: np.ndarray) -> np.ndarray:
    """Unpacks codes of four bits along the last axis, the first one in the high bits."""
    codes = packed.astype("<u2")
    words = as_words(codes)
    second = words << words.dtype.type(8)
    words >>= words.dtype.type(4)
    words |= second
    words &= in_each_byte(15, words)
    return codes.view(np.uint8)


def unpack_columns(words: np.ndarray, bits: int, order: np.ndarray) -> np.ndarray:
    """Unpacks 32-bit words along the first axis, without gaps.

    Words are `(n, rows)`, the first code in the low bits.

    Returns the codes in another order, whole lines of them: `order` has the index of each line.
    """
    if 8 % bits == 0:
        return _take_columns(words, bits, order)
    count, rows = words.shape
    words = words.reshape(count // bits, bits, rows)  # so many words end with a whole code
    # Narrowing a whole array is faster than copying every fourth byte of it.
    byte = [(words[:, n // 4] >> np.int32(n % 4 * 8)).astype(np.uint8) for n in range(4 * bits)]
    codes = np.empty((count // bits, 32, rows), np.uint8)
    for n in range(32):
        first, low = divmod(n * bits, 8)
        part = byte[first] >> np.uint8(low)
        if low + bits > 8:
            part |= byte[first + 1] << np.uint8(8 - low)
        np.bitwise_and(part, np.uint8(2**bits - 1), out=codes[:, n])
    return codes.reshape(-1, rows).take(order, axis=0, mode="wrap")


def _take_columns(words: np.ndarray, bits: int, order: np.ndarray) -> np.ndarray:
    """As `unpack_columns`, for codes that divide a byte.

    Whole arrays are shifted, and the order says where codes end up.
    """
    count, rows = words.shape
    per_byte = 8 // bits
    codes = np.empty((per_byte, 4, count, rows), np.uint8)
    for n in range(4):
        np.copyto(codes[-1, n], words >> np.int32(8 * n), casting="unsafe")
    byte = as_words(codes[-1])
    for n in range(per_byte if bits < 8 else 0):  # the last one in place
        part = np.right_shift(byte, byte.dtype.type(n * bits), out=as_words(codes[n]))
        part &= in_each_byte(2**bits - 1, part)
    word, within = np.divmod(order, 4 * per_byte)
    n, code = np.divmod(within, per_byte)
    return codes.reshape(-1, rows).take((code * 4 + n) * count + word, axis=0, mode="wrap")


def _unpack_straddling(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks codes that straddle bytes: 8 codes in `bits` bytes become a word of 8 bytes."""
    *batch, length = packed.shape
    groups = -(-length // bits)
    padded = np.empty((math.prod(batch) * groups * bits + 8,), np.uint8)
    rows = padded[:-8].reshape(*batch, groups * bits)
    rows[..., :length] = packed
    rows[..., length:] = 0
    words = np.ndarray((math.prod(batch) * groups,), "<u8", padded, 0, (bits,)).copy()  # they overlap
    # Twice as many lanes, of half the codes each, until each code has a byte.
    for count in (4, 2, 1):
        low = (1 << count * bits) - 1
        shift = 8 * count - count * bits
        lanes = sum(1 << at for at in range(0, 64, 16 * count))
        high = words << np.uint64(shift)
        high &= np.uint64((low << 8 * count) * lanes)
        words &= np.uint64(low * lanes)
        words |= high
    codes = words.view(np.uint8).reshape(*batch, groups * 8)
    return codes[..., : length * 8 // bits]


def pack_planes(codes: np.ndarray, bits: int, run: int) -> np.ndarray:
    """The inverse of `unpack_planes`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    groups = codes.reshape(*codes.shape[:-1], -1, 8 // bits, run) << shifts
    return np.bitwise_or.reduce(groups, axis=-2).reshape(*codes.shape[:-1], -1)


def pack_low_first(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack_low_first`, for codes that fill whole bytes."""
    if bits == 8:
        return codes
    if 8 % bits:
        each_bit = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
        return np.packbits(each_bit.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return pack_planes(codes, bits, 1)


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packs codes along the last axis into 32-bit words without gaps.

    The last word may be incomplete.
    """
    words = -(-codes.shape[-1] * bits // 32)
    padding = -codes.shape[-1] % (32 // math.gcd(32, bits))
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, padding)]) if padding else codes
    return np.ascontiguousarray(pack_low_first(padded, bits)[..., : 4 * words]).view(np.int32)


def pack_codes(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Packs codes, `(..., length)`, into bytes: `_numerics.packing.pack` in NumPy.

    Both may also be wider integers, whose bytes are codes of different rows.
    """
    if bits == 8:
        out[...] = codes
        return
    split, size = _whole_segments(codes.shape[-1], bits)
    if split:
        _pack_segments(codes[..., :split], bits, out[..., :size])
    if split < codes.shape[-1]:
        _pack_short_segment(codes[..., split:], bits, out[..., size:])


def pack_columns(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Packs codes along the first axis into bytes along the last one.

    Codes are `(length, rows)`, bytes `(rows, bytes)`.
    """
    length, rows = codes.shape
    if bits == 8:
        _transpose(codes, out)
        return
    split, size = _whole_segments(length, bits)
    packed = np.empty((out.shape[1], rows), np.uint8)
    if split:
        _pack_segments(codes[:split].view(f"V{rows}")[:, 0], bits, packed[:size].view(f"V{rows}")[:, 0])
    if split < length:
        last = np.empty((rows, out.shape[1] - size), np.uint8)
        _pack_short_segment(np.ascontiguousarray(codes[split:].T), bits, last)
        packed[size:] = last.T
    _transpose(packed, out)


def _transpose(x: np.ndarray, out: np.ndarray) -> None:
    """Transposes bytes. Eight that end up side by side move as one."""
    length, rows = x.shape
    if length % 8 or not out.flags.c_contiguous:
        out[...] = x.T
        return
    eights = off_stride(length // 8, rows, np.uint64)
    each = eights[..., np.newaxis].view(np.uint8)
    for n in range(8):
        each[..., n] = x[n::8]
    out.view(np.uint64)[...] = eights.T


def off_stride(lines: int, length: int, dtype: DTypeLike) -> np.ndarray:
    """Returns memory that is fast to read across its lines.

    Lines a power of two apart would share a few places in the caches of a processor.
    """
    return np.empty((lines, length + 1), dtype)[:, :length]


def _whole_segments(length: int, bits: int) -> tuple[int, int]:
    """Returns how many of the codes are in whole segments, and the bytes of these."""
    count = length // segment_length(bits)
    return count * segment_length(bits), count * packed_length(segment_length(bits), bits)


def _pack_segments(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Packs whole segments: a plane of codes, and a slab of bytes, is one item."""
    planes, slabs = codes.view(f"V{PLANE * codes.itemsize}"), out.view(f"V{PLANE * codes.itemsize}")
    per_segment, slabs_per_segment = num_planes(bits), packed_length(segment_length(bits), bits) // PLANE
    words = [as_words(np.ascontiguousarray(planes[..., n::per_segment])) for n in range(per_segment)]
    slab, low = 0, 0
    for width in widths(bits):
        for first in range(0, per_segment, 8 // width):
            packed = _part(words[first], low, width, 0, width == bits)
            for n in range(1, 8 // width):
                packed |= _part(words[first + n], low, width, n * width, width == bits)
            into = slabs[..., slab::slabs_per_segment]
            into[...] = packed.view(into.dtype).reshape(into.shape)
            slab += 1
        low += width


def _part(codes: np.ndarray, low: int, width: int, at: int, whole: bool) -> np.ndarray:
    """Moves `width` bits of codes from bit `low` to bit `at`.

    Clears other bits unless `whole`.
    """
    moved = codes << np.uint64(at - low) if at > low else codes >> np.uint64(low - at)
    if not whole:
        moved &= in_each_byte((2**width - 1) << at, moved)
    return moved


def _pack_short_segment(codes: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Packs a last segment, whose planes are shorter.

    The last ones of each part of a code are perhaps incomplete.
    """
    if len(widths(bits)) == 1:
        plane = out.shape[-1]
        out[...] = codes[..., :plane]
        for n in range(1, 8 // bits):
            part = codes[..., n * plane : (n + 1) * plane]
            out[..., : part.shape[-1]] |= part << np.uint8(n * bits)
        return
    at, low = 0, 0
    for width in widths(bits):
        size = packed_length(codes.shape[-1], width)
        pack_codes(codes >> np.uint8(low) & np.uint8(2**width - 1), width, out[..., at : at + size])
        at, low = at + size, low + width
