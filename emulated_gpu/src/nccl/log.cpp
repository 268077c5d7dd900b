#include "log.h"

#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../settings.h"

namespace emulated {
namespace {

int asked_for() {
  const char* level = getenv("NCCL_DEBUG");
  if (settings().nccl_verbose > 0) return 2;
  if (!level) return 0;
  if (!strcasecmp(level, "WARN")) return 1;
  return !strcasecmp(level, "INFO") || !strcasecmp(level, "TRACE") ? 2 : 0;
}

}  // namespace

void log(Level level, int device, const std::string& text) {
  static const int upto = asked_for();
  if (upto < (level == Level::warn ? 1 : 2)) return;
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  fprintf(stdout, "%s:%d:%ld [%d] %s%s\n", host, getpid(), static_cast<long>(syscall(SYS_gettid)), device,
          level == Level::warn ? "emulated NCCL WARN " : "NCCL INFO (emulated) ", text.c_str());
  fflush(stdout);
}

}  // namespace emulated
