// Messages in NCCL's format, and NCCL's switch for them: NCCL_DEBUG=WARN or INFO (NCCL 2.30.7, src/debug.cc).
#pragma once

#include <string>

namespace emulated {

enum class Level { warn, info };

// Prints `text` if NCCL_DEBUG asks for the level. Each line says "emulated" where NCCL names its source file.
void log(Level level, int device, const std::string& text);

}  // namespace emulated
