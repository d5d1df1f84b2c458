// Fills the memory of kernels with bytes that are NaN, so that tests see what is read before it is written.
#ifndef EQQUANT_TESTS_POISON_H_
#define EQQUANT_TESTS_POISON_H_

#include <stdlib.h>
#include <string.h>

#include <new>

// What `allocate_aligned` calls.
void* operator new(size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  const size_t step = static_cast<size_t>(alignment), bytes = (size + step - 1) / step * step;
  void* memory = aligned_alloc(step, bytes);
  return memory == nullptr ? nullptr : memset(memory, 0xff, bytes);
}
void* operator new(size_t size, std::align_val_t alignment) {
  void* memory = operator new(size, alignment, std::nothrow);
  return memory != nullptr ? memory : throw std::bad_alloc();
}
void operator delete(void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { free(memory); }
void operator delete(void* memory, std::align_val_t, const std::nothrow_t&) noexcept { free(memory); }

#endif  // EQQUANT_TESTS_POISON_H_
