// torch's headers include this name too; what they use of it is in cuda_runtime_api.h.
#pragma once

#include <cuda_runtime_api.h>
