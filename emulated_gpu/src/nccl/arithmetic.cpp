#include "arithmetic.h"

#include <cstring>

namespace emulated {
namespace {

// bfloat16: the upper half of a float, rounded to nearest even.
struct Bfloat16 {
  uint16_t bits;
  Bfloat16() = default;
  explicit Bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    bits = value != value ? 0x7fc0 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
  explicit operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};

// What a type is computed in.
template <class T>
struct WideOf {
  using type = T;
};
template <>
struct WideOf<_Float16> {
  using type = float;
};
template <>
struct WideOf<Bfloat16> {
  using type = float;
};

template <class T>
void multiply(T* values, size_t count, double factor) {
  using Wide = typename WideOf<T>::type;
  for (size_t k = 0; k < count; k++) values[k] = T(static_cast<Wide>(static_cast<Wide>(values[k]) * static_cast<Wide>(factor)));
}

template <class T>
void combine(T* into, const T* other, size_t count, ncclRedOp_t op) {
  using Wide = typename WideOf<T>::type;
  auto wide = [](T value) { return static_cast<Wide>(value); };
  switch (op) {
    case ncclProd:
      for (size_t k = 0; k < count; k++) into[k] = T(static_cast<Wide>(wide(into[k]) * wide(other[k])));
      break;
    case ncclMax:
      for (size_t k = 0; k < count; k++) into[k] = wide(into[k]) < wide(other[k]) ? other[k] : into[k];
      break;
    case ncclMin:
      for (size_t k = 0; k < count; k++) into[k] = wide(other[k]) < wide(into[k]) ? other[k] : into[k];
      break;
    default:
      for (size_t k = 0; k < count; k++) into[k] = T(static_cast<Wide>(wide(into[k]) + wide(other[k])));
  }
}

// The average of floating-point numbers multiplies by 1/ranks before it sums, that of integers divides the sum
// (NCCL 2.30.7, src/enqueue.cc, hostToDevRedOp: ncclDevPreMulSum and ncclDevSumPostDiv).
template <class T>
void reduce_as(const std::vector<char*>& parts, size_t count, const Reduction& reduction, bool integer) {
  T ranks = T(static_cast<float>(parts.size()));
  auto of_rank = [&](size_t rank) { return reinterpret_cast<T*>(parts[rank]); };
  double factor = reduction.factor_on_device ? scalar_value(reduction.factor_on_device, reduction.factor_type) : reduction.factor;
  if (reduction.op == ncclAvg && !integer) factor = 1.0 / parts.size();
  if (factor != 1)
    for (size_t rank = 0; rank < parts.size(); rank++) multiply(of_rank(rank), count, factor);
  for (size_t rank = 1; rank < parts.size(); rank++) combine(of_rank(0), of_rank(rank), count, reduction.op);
  if constexpr (std::is_integral_v<T>)
    if (reduction.op == ncclAvg)
      for (size_t k = 0; k < count; k++) of_rank(0)[k] = static_cast<T>(of_rank(0)[k] / ranks);
}

}  // namespace

size_t bytes_of(ncclDataType_t type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return bytes[type];
}

bool can_reduce(ncclDataType_t type) { return type < ncclFloat8e4m3; }

double scalar_value(const void* scalar, ncclDataType_t type) {
  switch (type) {
    case ncclInt8: return *static_cast<const int8_t*>(scalar);
    case ncclUint8: return *static_cast<const uint8_t*>(scalar);
    case ncclInt32: return *static_cast<const int32_t*>(scalar);
    case ncclUint32: return *static_cast<const uint32_t*>(scalar);
    case ncclInt64: return static_cast<double>(*static_cast<const int64_t*>(scalar));
    case ncclUint64: return static_cast<double>(*static_cast<const uint64_t*>(scalar));
    case ncclFloat16: return static_cast<double>(*static_cast<const _Float16*>(scalar));
    case ncclFloat32: return *static_cast<const float*>(scalar);
    case ncclFloat64: return *static_cast<const double*>(scalar);
    case ncclBfloat16: return static_cast<float>(*static_cast<const Bfloat16*>(scalar));
    default: return 1;
  }
}

void reduce(const std::vector<char*>& parts, size_t count, ncclDataType_t type, const Reduction& reduction) {
  switch (type) {
    case ncclInt8: return reduce_as<int8_t>(parts, count, reduction, true);
    case ncclUint8: return reduce_as<uint8_t>(parts, count, reduction, true);
    case ncclInt32: return reduce_as<int32_t>(parts, count, reduction, true);
    case ncclUint32: return reduce_as<uint32_t>(parts, count, reduction, true);
    case ncclInt64: return reduce_as<int64_t>(parts, count, reduction, true);
    case ncclUint64: return reduce_as<uint64_t>(parts, count, reduction, true);
    case ncclFloat16: return reduce_as<_Float16>(parts, count, reduction, false);
    case ncclFloat32: return reduce_as<float>(parts, count, reduction, false);
    case ncclFloat64: return reduce_as<double>(parts, count, reduction, false);
    case ncclBfloat16: return reduce_as<Bfloat16>(parts, count, reduction, false);
    default: return;
  }
}

}  // namespace emulated
