// torch's headers include this name too; of the driver's types they name only the result.
#pragma once

#include <cuda_runtime_api.h>

typedef int CUresult;
