// Helpers of the functions that XLA calls: buffers as matrices, and results.
#pragma once

#include <string>

#include "core/problem.h"
#include "xla/ffi/api/ffi.h"

#if defined(_WIN32)
#define EQQ_EXPORT extern "C" __declspec(dllexport)
#else
#define EQQ_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace ffi = xla::ffi;

namespace {

inline bool float_type(ffi::DataType type, int32_t* out) {
  switch (type) {
    case ffi::DataType::F32: *out = kFloat32; return true;
    case ffi::DataType::BF16: *out = kBFloat16; return true;
    case ffi::DataType::F16: *out = kFloat16; return true;
    default: return false;
  }
}

// (*batch, rows, columns), the batch folded into one axis.
struct Matrix {
  int64_t batch, rows, columns;
};

inline bool as_matrix(ffi::AnyBuffer buffer, Matrix* out) {
  const auto dims = buffer.dimensions();
  if (dims.size() < 2) return false;
  out->batch = 1;
  for (size_t i = 0; i + 2 < dims.size(); ++i) out->batch *= dims[i];
  out->rows = dims[dims.size() - 2];
  out->columns = dims[dims.size() - 1];
  return true;
}

inline ffi::Error bad(const char* why) { return ffi::Error::InvalidArgument(std::string("eqquant_cpu: ") + why); }
inline ffi::Error done(bool enough) {
  if (enough) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, "eqquant_cpu: there is not enough memory");
}

}  // namespace
