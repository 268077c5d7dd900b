// Which block of memory an address lies in.
#pragma once

#include <cstddef>

#include "../settings.h"

namespace emulated {

// False if the address belongs to no allocation of the runtime.
EMULATED_EXPORT bool address_range(const void* pointer, void** begin, size_t* bytes);

}  // namespace emulated
